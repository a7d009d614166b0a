// What a kernel sees: plain structs of pointers, sizes and strides. No tensor, no framework.
//
// Every pointer carries its shape. Strides count elements; the element stride of q, k, v, out and
// their gradients is 1. A packed (varlen) tensor is (total, heads, dim): its batch_stride is 0 and
// the rows of a sequence start at SeqInfo's offset. "acc" is the type that sums are kept in: double
// for float64 inputs, float otherwise.
#pragma once

#include <cstdint>

#include "common/number.h"
#include "common/score.h"
#include "common/seqlen.h"

namespace flash {

// (batch, row, head, dim)
struct View {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  FLASH_HD int64_t at(int batch, int64_t row, int head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// (batch, num_heads, seqlen_q, seqlen_k); a stride of 0 is a broadcast dimension.
struct BiasView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t key_stride = 0;
  DType dtype = DType::kNone;

  // One head's matrix.
  FLASH_HD BiasMatrix of(int batch, int head) const {
    if (!data) return {nullptr, 0, 0, DType::kNone};
    const int64_t at = batch * batch_stride + head * head_stride;
    return {static_cast<const char*>(data) + at * dtype_size(dtype), row_stride, key_stride, dtype};
  }
};

// One acc value a (sequence, head): (num_heads,) has batch_stride 0.
struct HeadValues {
  const void* data = nullptr;
  int64_t batch_stride = 0;

  template <typename T>
  FLASH_HD T of(int batch, int head, T otherwise) const {
    return data ? static_cast<const T*>(data)[batch * batch_stride + head] : otherwise;
  }
};

// Shared by every pass.
struct AttnParams {
  View q;  // (batch, seqlen_q, num_heads, head_dim) or (total_q, num_heads, head_dim)
  View k;  // (batch, seqlen_k, num_heads_k, head_dim) or (total_k, num_heads_k, head_dim)
  View v;  // the same with head_dim_v

  int batch = 0;
  int num_heads = 0;
  int num_heads_k = 0;  // divides num_heads; query head h reads key head h / group()
  int head_dim = 0;
  int head_dim_v = 0;
  SeqSide side_q{};
  SeqSide side_k{};

  double softmax_scale = 0;  // of the caller's head_dim
  double softcap = 0;        // 0: off
  int window_left = -1;      // keys before the diagonal, -1: unbounded
  int window_right = -1;     // keys after it; causal is 0
  BiasView bias;
  HeadValues alibi_slopes;
  HeadValues sinks;  // (num_heads,)

  const int64_t* rng_state = nullptr;  // (2,), where the kernel runs
  int dropout_threshold = 0;           // round(256 p), 0: no dropout
  bool deterministic = false;

  FLASH_HD int group() const { return num_heads / num_heads_k; }

  // lse, delta and the like are (batch, num_heads, seqlen_q), or (num_heads, total_q) when packed.
  FLASH_HD int64_t row_index(int b, int head, const SeqInfo& seq, int i) const {
    const int64_t sequence = side_q.cu_seqlens ? 0 : b;
    return (sequence * num_heads + head) * side_q.total + seq.offset_q + i;
  }
  FLASH_HD int64_t num_rows() const {
    return (side_q.cu_seqlens ? 1 : batch) * static_cast<int64_t>(num_heads) * side_q.total;
  }
};

struct FwdParams : AttnParams {
  View out;             // like q with head_dim_v
  void* lse = nullptr;  // acc, see row_index; natural log
  int num_splits = 1;   // parts that the keys of a row are split into, merged by lse
  void* workspace = nullptr;
};

struct BwdParams : AttnParams {
  View out;                    // the forward's
  View dout;                   // like out
  const void* lse = nullptr;   // acc, see row_index
  const void* dlse = nullptr;  // acc, the same; null: lse is not used

  View dq;  // contiguous, like q; data is null when not needed, here and below
  View dk;
  View dv;
  // dbias has the caller's bias sizes; its strides are those of a contiguous tensor, 0 where
  // broadcast, so a gradient sums over exactly the dimensions of stride 0.
  BiasView dbias;
  void* dalibi_slopes = nullptr;  // acc, shaped like the slopes
  void* dsinks = nullptr;         // acc (num_heads,)
  void* workspace = nullptr;
};

struct ProbsParams : AttnParams {
  const void* lse = nullptr;  // acc, see row_index
  void* probs = nullptr;      // (batch, num_heads, max_seqlen_q, max_seqlen_k) of q's type
};

// Where a kernel runs: a stream on a GPU, torch's threads on a CPU.
struct Launch {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  void* stream = nullptr;
  void (*parallel_for)(int64_t begin, int64_t end, Body body, void* context) = nullptr;
};

}  // namespace flash
