// From an operator's arguments to checked params.
//
// The only place that validates a call. A bad value is a std::invalid_argument (Python:
// ValueError), a feature no kernel has a std::runtime_error (Python: RuntimeError); both say what,
// got, allowed and what to do, and both come before any allocation or launch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"

namespace flash {

using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1;  // row and key numbers add up in 32 bits
constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;   // batch and heads are 32-bit

// Takes the arguments of a boxed call off the stack, in the schema's order.
class Reader {
 public:
  explicit Reader(StableIValue* stack) : stack_(stack) {}
  template <typename T>
  T next() {
    return torch::stable::detail::to<T>(stack_[at_++]);
  }

 private:
  StableIValue* stack_;
  int at_ = 0;
};

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument("flash: " + text.str());
}

// One call's arguments; lengths and defaults not yet resolved.
struct AttnArgs {
  OptTensor q, k, v;
  OptTensor bias, alibi_slopes, sinks;
  OptTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, rng_state, leftpad_k;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  std::optional<double> softmax_scale;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0, dropout_p = 0;
  bool deterministic = false;
  int64_t num_splits = 0;

  bool varlen() const { return cu_seqlens_q.has_value(); }  // q is packed; k and v unless paged
  bool paged() const { return page_table.has_value(); }

  void read_attn(Reader& reader);   // q, k, v are read by the caller; the rest of FLASH_ATTN_ARGS
  void read_probs(Reader& reader);  // what attn_probs takes after lse
};

// Checks the arguments, makes what must be contiguous so (the tensors inside `args` are replaced
// and keep the memory alive), fills the shared params and says which features the call needs.
uint32_t prepare(AttnArgs& args, AttnParams& params);

// A tensor as rows of a head; the last dimension is contiguous after contiguous_rows.
View view_of(const Tensor& t, bool varlen);
void fill_views(const AttnArgs& args, AttnParams& params);  // of q, k and v
Tensor contiguous_rows(const Tensor& t);
Tensor as_contiguous(const Tensor& t);

std::vector<int64_t> shape_of(const Tensor& t);

// Checks of one tensor, by name; `meaning` and `layout` say what a shape stands for.
void check_device(const char* name, const Tensor& t, const Tensor& q);
void check_rank(const char* name, const Tensor& t, int64_t rank, const char* layout);
void check_shape(const char* name, const Tensor& t, const std::vector<int64_t>& shape,
                 const char* meaning);
void check_at_most(const char* what, int64_t got, int64_t most, const char* remedy);
// int32, made contiguous; null passes.
void check_lengths(const char* name, OptTensor& t, const std::vector<int64_t>& shape,
                   const char* meaning, const Tensor& q);
std::string dtype_text(const Tensor& t);
std::string shape_text(const std::vector<int64_t>& shape);
// Checks a page table of `batch` sequences for the cache k and fills the params' pages; returns the
// keys that a row of it can name.
int64_t fill_pages(OptTensor& page_table, const Tensor& k, const Tensor& q, AttnParams& params);

void check_like(const char* name, const Tensor& t, const std::vector<int64_t>& shape,
                torch::headeronly::ScalarType dtype, const Tensor& q);

DType dtype_of(const Tensor& t);
torch::headeronly::ScalarType acc_type(const Tensor& q);

// Shapes that follow from the arguments.
std::vector<int64_t> out_shape(const AttnArgs& args);
std::vector<int64_t> lse_shape(const AttnArgs& args);

}  // namespace flash
