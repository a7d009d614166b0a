// How keys are split over blocks, for the kernels that split them: which part of which heads' keys
// a block reads, and where the parts lie until they are merged.
//
// A run is the keys of one sequence and one band of key heads, in units of kBlockN keys. Blocks
// come in teams of one block a (head of the band, tile of query rows): a team reads the same keys
// of neighbouring heads at the same time, so that pages, and rows that several tiles need, are
// found where another block has just been. Two ways to split, both of which find their lengths on
// the device:
//
//   balanced (num_splits 0)   the units of all runs stand in one row, cut into pieces, one a team:
//   a
//                             team has the end of one run, whole ones, the beginning of the next.
//                             Pieces differ by one unit at most, whatever the lengths.
//
//        run 0       |   run 1     |2|     run 3
//        u u u u u u | u u u u u u |u| u u u u u u u
//        team 0    | team 1    | team 2    | team 3
//
//   fixed (num_splits n)      every run is cut into n parts of equal length, one a team. The cuts
//                             depend on the sequence's own length alone, and so do its bits.
//
// A block's part of a run that is not the whole goes to a slot of the workspace: rows' maxima, sums
// and outputs, not normalised. Balanced, a team has two rows of slots, for a part at its beginning
// and one at its end; fixed, it has one.
#pragma once

#include "../../common/tile_range.h"
#include "../../params.h"

#include <fragment.h>

namespace flash::cuda {

// The host's choices, from shapes alone.
struct SplitGrid {
  int num_splits;  // 0: balanced
  int teams;
  int band;   // key heads of a team; divides num_heads_k
  int tiles;  // of query rows, in the longest sequence

  FLASH_HD int team_size() const { return band * tiles; }
  // Whether some run may be in parts.
  FLASH_HD bool is_split() const { return num_splits > 0 ? num_splits > 1 : teams > 1; }
  FLASH_HD int64_t num_slots() const {
    return int64_t{teams} * team_size() * (num_splits > 0 ? 1 : 2);
  }
  // Of the block's place in its team.
  FLASH_HD int64_t slot(int row_of_slots, int member) const {
    return int64_t{row_of_slots} * team_size() + member;
  }
};

// A block's part of a run.
struct Segment {
  int batch, head_k, row_tile;
  Range blocks;  // of kBlockN keys
  int64_t slot;  // where the part goes; -1: it is the whole
};

// One sequence: its runs and their units. kRows query rows make a tile, kBlockN keys a unit.
template <int kRows, int kBlockN>
struct SplitSequence {
  Range blocks;  // of keys that some row sees
  int tiles;     // of query rows

  __device__ __forceinline__ SplitSequence(const AttnParams& p, int batch) {
    const SeqInfo seq = seq_info(p.side_q, p.side_k, batch);
    const Mask mask = {seq.seqlen_q, seq.seqlen_k, p.window_left, p.window_right, seq.first_k};
    blocks = blocks_of(mask.keys_of({0, seq.seqlen_q}), kBlockN);
    tiles = ceil_div(seq.seqlen_q * p.group(), kRows);
  }

  // A run without keys still has its rows to write; one without rows has nothing.
  __device__ __forceinline__ unsigned units_of_run() const {
    return tiles == 0 ? 0u : static_cast<unsigned>(max_of(blocks.size(), 1));
  }
};

// The cut of all units into pieces: the first ones have one more. 32-bit throughout, for divisions
// of 64 bits cost a block of a short call more than its copies; the host checks that units fit.
struct Pieces {
  unsigned count;  // never more than units: no piece is empty
  unsigned each, longer;

  __device__ __forceinline__ Pieces(unsigned units, int teams)
      : count(min_of(units, static_cast<unsigned>(teams))),
        each(count ? units / count : 0),
        longer(count ? units % count : 0) {}

  __device__ __forceinline__ unsigned begin(unsigned piece) const {
    return piece * each + min_of(piece, longer);
  }
  __device__ __forceinline__ unsigned piece_of(unsigned unit) const {
    const unsigned in_longer = longer * (each + 1);
    return unit < in_longer ? unit / (each + 1) : longer + (unit - in_longer) / each;
  }
};

// Finds a unit in the row of all units. All threads of the block call it; lengths are read once.
template <int kRows, int kBlockN, int kThreads>
class SplitIndex {
  using Sequence = SplitSequence<kRows, kBlockN>;
  static constexpr int kWarps = kThreads / kWarpSize;

 public:
  struct Storage {
    unsigned warp_sum[kWarps];
    unsigned first;  // units before the sequence that was found
    int batch;
  };

  __device__ __forceinline__ SplitIndex(const AttnParams& params, const SplitGrid& grid,
                                        Storage& storage)
      : p(params), smem(storage), bands_(static_cast<unsigned>(p.num_heads_k / grid.band)) {
    is_uniform_ = !p.side_q.cu_seqlens && !p.side_q.seqused && !p.side_k.cu_seqlens &&
                  !p.side_k.seqused && !p.side_k.leftpad;
    if (is_uniform_) {
      sum_ = p.batch > 0 ? units_of(0) : 0;
      total_ = sum_ * static_cast<unsigned>(p.batch);
      return;
    }
    chunk_ = ceil_div(p.batch, kThreads);
    sum_ = 0;
    for (int b = chunk_begin(); b < chunk_end(); ++b) sum_ += units_of(b);
    before_ = scan(sum_);
  }

  __device__ __forceinline__ unsigned total() const { return total_; }
  __device__ __forceinline__ unsigned units_of(int batch) const {
    return Sequence(p, batch).units_of_run() * bands_;
  }

  // The sequence that holds `unit` < total(), and the units before that sequence.
  __device__ __forceinline__ void find(unsigned unit, int& batch, unsigned& first) {
    if (is_uniform_) {
      batch = static_cast<int>(unit / sum_);
      first = static_cast<unsigned>(batch) * sum_;
      return;
    }
    if (unit >= before_ && unit < before_ + sum_) {
      unsigned at = before_;
      int b = chunk_begin();
      for (unsigned n; unit >= at + (n = units_of(b)); ++b) at += n;
      smem.batch = b;
      smem.first = at;
    }
    __syncthreads();
    batch = smem.batch;
    first = smem.first;
  }

  // The units before sequence `batch`.
  __device__ __forceinline__ unsigned first_of(int batch) {
    if (is_uniform_) return static_cast<unsigned>(batch) * sum_;
    if (batch >= chunk_begin() && batch < chunk_end()) {
      unsigned at = before_;
      for (int b = chunk_begin(); b < batch; ++b) at += units_of(b);
      smem.first = at;
    }
    __syncthreads();
    return smem.first;
  }

 private:
  __device__ __forceinline__ int chunk_begin() const {
    return min_of(static_cast<int>(threadIdx.x) * chunk_, p.batch);
  }
  __device__ __forceinline__ int chunk_end() const {
    return min_of(chunk_begin() + chunk_, p.batch);
  }

  // The sum over the threads before this one; total_ becomes that over all.
  __device__ __forceinline__ unsigned scan(unsigned x) {
    const unsigned inclusive = scan_warp(x);
    if (lane_id() == kWarpSize - 1) smem.warp_sum[warp_id()] = inclusive;
    __syncthreads();
    unsigned before = inclusive - x;
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
  unsigned bands_;
  int chunk_ = 0;
  unsigned sum_ = 0, before_ = 0, total_ = 0;
};

}  // namespace flash::cuda
