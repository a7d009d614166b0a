// What a kernel sees: plain structs of pointers, sizes and strides. No tensor, no framework.
//
// Every pointer carries its shape. Strides count elements; the element stride of q, k, v, out and
// their gradients is 1. A packed (varlen) tensor is (total, heads, dim): its batch_stride is 0 and
// the rows of a sequence start at SeqInfo's offset. "acc" is the type that sums are kept in: double
// for float64 inputs, float otherwise.
#pragma once

#include <cstdint>

#include "common/number.h"
#include "common/rotary.h"
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

// Where paged keys lie: key j of sequence b is row j % page_size of page table[b, j / page_size].
struct Pages {
  const int32_t* table = nullptr;  // (batch, max_pages), contiguous; null: k and v are not paged
  int max_pages = 0;
  int num_pages = 0;
  int page_size = 1;

  FLASH_HD bool is_on() const { return table != nullptr; }
  // Clamped, never trusted: a bad entry reads some page, never outside of k and v.
  FLASH_HD int page(int batch, int index) const {
    return clamp_to(table[static_cast<int64_t>(batch) * max_pages + index], 0, num_pages - 1);
  }
};

// Shared by every pass.
struct AttnParams {
  View q;  // (batch, seqlen_q, num_heads, head_dim) or (total_q, num_heads, head_dim)
  View k;  // (batch, seqlen_k, num_heads_k, head_dim), (total_k, num_heads_k, head_dim), or paged
           // (num_pages, page_size, num_heads_k, head_dim)
  View v;  // the same with head_dim_v

  int batch = 0;
  int num_heads = 0;
  int num_heads_k = 0;  // divides num_heads; query head h reads key head h / group()
  int head_dim = 0;
  int head_dim_v = 0;
  SeqSide side_q{};
  SeqSide side_k{};
  Pages pages;  // of k and v

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

  // Key j of sequence b, as an element offset into k or v.
  FLASH_HD int64_t key_at(const View& view, int b, const SeqInfo& seq, int j, int head_k) const {
    if (!pages.is_on()) return view.at(b, seq.offset_k + j, head_k);
    return view.at(pages.page(b, j / pages.page_size), j % pages.page_size, head_k);
  }

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
  int num_splits = 0;   // parts that the keys of a row are split into; 0: as the kernel likes
  void* workspace = nullptr;

  // Of a kernel that does not choose.
  FLASH_HD int splits() const { return max_of(num_splits, 1); }
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

// One row of queries or of new keys: the sequence that it belongs to and its place there.
struct SeqRow {
  int batch;
  int dense_batch;  // what View::at takes: 0 for a packed tensor
  int64_t row;      // likewise
  int index;        // inside the sequence
  bool is_inside;   // false: the row belongs to no sequence
};

// Shared by what works row by row: q, or the new keys, by side_q.
struct RowParams : AttnParams {
  FLASH_HD int64_t num_new_rows() const {
    return side_q.cu_seqlens ? side_q.total : batch * side_q.total;
  }
  FLASH_HD SeqRow find_row(int64_t at) const {
    if (!side_q.cu_seqlens) {
      const int b = static_cast<int>(at / side_q.total);
      const int64_t row = at % side_q.total;
      return {b, b, row, static_cast<int>(row), true};
    }
    const int b = side_q.sequence_of(at, batch);
    const int64_t index = at - side_q.offset(b);
    return {b, 0, at, static_cast<int>(index), index >= 0 && index < side_q.length(b)};
  }
};

// Rotary embedding of q (batch, seqlen, num_heads, head_dim), or packed, into out, likewise.
struct RotaryParams : RowParams {
  View out;
  Rotary rotary;
  const int32_t* offsets = nullptr;  // (batch,) position of each sequence's first row; null: 0

  FLASH_HD int64_t position(const SeqRow& row) const {
    return row.index + (offsets ? static_cast<int64_t>(offsets[row.batch]) : 0);
  }
};

// Where a new key goes.
struct NewRow {
  int batch_new;  // dense_batch of the new tensors
  int64_t row;
  int batch_cache;  // page, or sequence of a dense cache
  int row_cache;
  int64_t position;  // for the rotation
  bool is_written;
};

// New keys and values into the caches k and v, in place, at cache_seqlens.
struct AppendParams : RowParams {
  View new_k;  // (batch, seqlen_new, num_heads_k, head_dim), or packed (total, …)
  View new_v;  // the same with head_dim_v
  Rotary rotary;
  const int32_t* cache_seqlens = nullptr;  // (batch,) keys before the new ones
  int32_t* seqused_k = nullptr;            // (batch,) written: keys in use afterwards

  FLASH_HD int64_t used_before(int b) const { return max_of(cache_seqlens[b], 0); }
  FLASH_HD int32_t used_after(int b) const {
    return static_cast<int32_t>(min_of<int64_t>(used_before(b) + side_q.length(b), side_k.total));
  }
  FLASH_HD NewRow locate(int64_t at) const {
    const SeqRow row = find_row(at);
    const int64_t key = used_before(row.batch) + row.index;
    NewRow to = {row.dense_batch,       row.row, row.batch,
                 static_cast<int>(key), key,     row.is_inside && key < side_k.total};
    if (!to.is_written || !pages.is_on()) return to;
    to.batch_cache =
        pages.table[static_cast<int64_t>(row.batch) * pages.max_pages + key / pages.page_size];
    to.row_cache = static_cast<int>(key % pages.page_size);
    to.is_written = to.batch_cache >= 0 && to.batch_cache < pages.num_pages;
    return to;
  }
};

// Where a kernel runs: a stream on a GPU, torch's threads on a CPU.
struct Launch {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  void* stream = nullptr;
  void (*parallel_for)(int64_t begin, int64_t end, Body body, void* context) = nullptr;
};

}  // namespace flash
