// How keys are split over blocks, for the kernels that split them: which part of which head's keys
// a block reads, and where the parts lie until they are merged.
//
// An item is one (sequence, key head, tile of query rows); its keys come in units of kBlockN. Two
// ways to split, both of which find their lengths on the device:
//
//   balanced (num_splits 0)   the units of all items stand in one row, cut into equal pieces, one a
//                             block: a block has the end of one item, whole ones, the beginning of
//                             the next. Unequal lengths are balanced by construction.
//
//        item 0      |   item 1    |2|     item 3
//        u u u u u u | u u u u u u |u| u u u u u u u
//        block 0   | block 1   | block 2   | block 3
//
//   fixed (num_splits n)      every item is cut into n runs of equal length, one a block. The cuts
//                             depend on the sequence's own length alone, and so do its bits.
//
// A part that is not a whole item goes to a slot of the workspace: rows' maxima, sums and outputs,
// not normalised. Balanced, block c has slot 2 c for a part at its beginning and 2 c + 1 for one at
// its end; fixed, split s of an item has slot item n + s.
#pragma once

#include "../../common/tile_range.h"
#include "../../params.h"

#include <fragment.h>

namespace flash::cuda {

// The host's choices, from shapes alone.
struct SplitGrid {
  int num_splits;  // 0: balanced
  int blocks;      // of the grid
  int max_tiles;   // row tiles of the longest sequence of queries

  // Whether some item may be in parts.
  FLASH_HD bool is_split() const { return num_splits > 0 ? num_splits > 1 : blocks > 1; }
  FLASH_HD int64_t num_slots(const AttnParams& p) const {
    return num_splits > 0 ? int64_t{p.batch} * p.num_heads_k * max_tiles * num_splits
                          : int64_t{2} * blocks;
  }
};

// A piece of an item's keys for one block, or the whole.
struct Segment {
  int batch, head_k, row_tile;
  Range blocks;   // of kBlockN keys
  int64_t slot;   // where the part goes; -1: it is the whole item
  bool is_valid;  // false: nothing is left
};

// Per sequence: its items and their units. kRows query rows make a tile, kBlockN keys a unit.
template <int kRows, int kBlockN>
struct SplitSequence {
  SeqInfo seq;
  Mask mask;
  Range blocks;  // of keys that some row sees
  int tiles;     // of query rows

  __device__ __forceinline__ SplitSequence(const AttnParams& p, int batch)
      : seq(seq_info(p.side_q, p.side_k, batch)),
        mask{seq.seqlen_q, seq.seqlen_k, p.window_left, p.window_right, seq.first_k},
        blocks(blocks_of(mask.keys_of({0, seq.seqlen_q}), kBlockN)),
        tiles(ceil_div(seq.seqlen_q * p.group(), kRows)) {}

  // An item without keys still has its rows to write.
  __device__ __forceinline__ int units_of_item() const { return max_of(blocks.size(), 1); }
  __device__ __forceinline__ int64_t units(const AttnParams& p) const {
    return static_cast<int64_t>(units_of_item()) * tiles * p.num_heads_k;
  }
};

// Finds a unit in the row of all units. All threads of the block call it; lengths are read once.
template <int kRows, int kBlockN, int kThreads>
class SplitIndex {
  using Sequence = SplitSequence<kRows, kBlockN>;
  static constexpr int kWarps = kThreads / kWarpSize;

 public:
  struct Storage {
    int64_t warp_sum[kWarps];
    int64_t first[2];  // units before the sequence that was found
    int batch[2];
  };

  __device__ __forceinline__ SplitIndex(const AttnParams& params, Storage& storage)
      : p(params), smem(storage) {
    is_uniform_ = !p.side_q.cu_seqlens && !p.side_q.seqused && !p.side_k.cu_seqlens &&
                  !p.side_k.seqused && !p.side_k.leftpad;
    if (is_uniform_) {
      sum_ = p.batch > 0 ? Sequence(p, 0).units(p) : 0;
      total_ = sum_ * p.batch;
      return;
    }
    chunk_ = ceil_div(p.batch, kThreads);
    sum_ = 0;
    for (int b = chunk_begin(); b < chunk_end(); ++b) sum_ += Sequence(p, b).units(p);
    before_ = scan(sum_);
  }

  __device__ __forceinline__ int64_t total() const { return total_; }

  // The sequence that holds `unit` < total(), and the units before that sequence. `slot` 0 or 1
  // keeps two searches apart.
  __device__ __forceinline__ void find(int64_t unit, int slot, int& batch, int64_t& first) {
    if (is_uniform_) {
      batch = static_cast<int>(unit / sum_);
      first = batch * sum_;
      return;
    }
    if (unit >= before_ && unit < before_ + sum_) {
      int64_t at = before_;
      int b = chunk_begin();
      for (int64_t n; unit >= at + (n = Sequence(p, b).units(p)); ++b) at += n;
      smem.batch[slot] = b;
      smem.first[slot] = at;
    }
    __syncthreads();
    batch = smem.batch[slot];
    first = smem.first[slot];
  }

 private:
  __device__ __forceinline__ int chunk_begin() const {
    return min_of(static_cast<int>(threadIdx.x) * chunk_, p.batch);
  }
  __device__ __forceinline__ int chunk_end() const {
    return min_of(chunk_begin() + chunk_, p.batch);
  }

  // The sum over the threads before this one; total_ becomes that over all.
  __device__ __forceinline__ int64_t scan(int64_t x) {
    const int64_t inclusive = scan_warp(x);
    if (lane_id() == kWarpSize - 1) smem.warp_sum[warp_id()] = inclusive;
    __syncthreads();
    int64_t before = inclusive - x;
    total_ = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp_id()) before += smem.warp_sum[w];
      total_ += smem.warp_sum[w];
    }
    return before;
  }

  const AttnParams& p;
  Storage& smem;
  bool is_uniform_;
  int chunk_ = 0;
  int64_t sum_ = 0, before_ = 0, total_ = 0;
};

// The unit at which block c's piece begins.
__device__ __forceinline__ int64_t piece_begin(int64_t total, int blocks, int c) {
  return total / blocks * c + total % blocks * c / blocks;
}

}  // namespace flash::cuda
