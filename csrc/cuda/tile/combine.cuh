// Merges rows whose keys were split: over the warps of a block, and over the blocks of a grid.
//
// A part of a row is its maximum m, its sum l of exp(s - m) and its output o, not normalised. Parts
// merge by exp(m - M), M the largest m. (Merging by lse would lose the sum next to a maximum of
// 1e38.)
#pragma once

#include "../../common/softmax.h"
#include "../launch.h"
#include "../primitives/dependents.h"

#include <fragment.h>

#include "split.cuh"

namespace flash::cuda {

// The workspace: slots of kDim-wide rows.
template <int kDim>
struct SplitParts {
  float* row_max;  // (slots, rows)
  float* row_sum;  // (slots, rows)
  float* o;        // (slots, rows, kDim)
  int rows;

  FLASH_HD SplitParts(void* workspace, int64_t slots, int rows_)
      : row_max(static_cast<float*>(workspace)),
        row_sum(row_max + slots * rows_),
        o(row_sum + slots * rows_),
        rows(rows_) {}
  static size_t bytes(int64_t slots, int rows) {
    return sizeof(float) * static_cast<size_t>(slots) * rows * (kDim + 2);
  }
};

// One row in the hands of a warp: a lane has kDim / 32 neighbouring elements.
template <int kDim>
struct MergedRow {
  static constexpr int kPerLane = kDim / kWarpSize;

  float m, sum;
  float o[kPerLane];

  __device__ __forceinline__ void start() {
    m = -INFINITY;
    sum = 0.f;
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) o[d] = 0.f;
  }
  // Every part is seen before the first one is added.
  __device__ __forceinline__ void see(float part_max) { m = fmaxf(m, part_max); }
  __device__ __forceinline__ void add(float part_max, float part_sum, float exp_scale,
                                      const float* part_o) {
    if (part_max == -INFINITY && part_sum == 0.f) return;  // nothing was seen; a NaN goes on
    const float weight = part_max == m ? 1.f : exp2_approx((part_max - m) * exp_scale);
    sum += weight * part_sum;
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) o[d] += weight * part_o[lane_id() * kPerLane + d];
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) to[lane_id() * kPerLane + d] = o[d];
  }
  __device__ __forceinline__ void store(const SplitParts<kDim>& parts, int64_t slot,
                                        int row) const {
    const int64_t at = slot * parts.rows + row;
    if (lane_id() == 0) {
      parts.row_max[at] = m;
      parts.row_sum[at] = sum;
    }
    store(parts.o + at * kDim);
  }
};

// A whole row: the sink, lse, and the output in its dtype. m counts in units of the plain product
// when the score is that alone.
template <typename In, int kDim>
__device__ __forceinline__ void write_row(const FwdParams& p, int batch, int head,
                                          const SeqInfo& seq, int i, bool plain,
                                          const MergedRow<kDim>& row) {
  const float to_natural = plain ? static_cast<float>(p.softmax_scale) : 1.f;
  const float m = row.m == -INFINITY ? -INFINITY : row.m * to_natural;
  const RowEnd<float> end = finish_row(m, row.sum, p.sinks.of(batch, head, -INFINITY));
  if (lane_id() == 0) static_cast<float*>(p.lse)[p.row_index(batch, head, seq, i)] = end.lse;
  uint16_t* out = static_cast<uint16_t*>(p.out.data) + p.out.at(batch, seq.offset_q + i, head);
#pragma unroll
  for (int d = 0; d < MergedRow<kDim>::kPerLane; ++d) {
    const int at = lane_id() * MergedRow<kDim>::kPerLane + d;
    if (at < p.head_dim_v)
      out[at] = static_cast<uint16_t>(pack2<In>(row.o[d] * end.out_scale, 0.f));
  }
}

// The parts of one item: consecutive pieces, or consecutive slots.
struct PartsOfItem {
  int batch, head_k, row_tile;
  int count;
  int first_piece;     // balanced: the block that has the item's beginning
  int64_t first_slot;  // its slot; fixed: of split 0
  bool is_split;
};

constexpr int kCombineWarps = 4;

template <typename In, int kDim, int kRows, int kBlockN>
class CombineBlock {
  static constexpr int kThreads = kCombineWarps * kWarpSize;
  using Sequence = SplitSequence<kRows, kBlockN>;
  using Index = SplitIndex<kRows, kBlockN, kThreads>;

 public:
  struct Storage {
    typename Index::Storage index;
    float sum[kCombineWarps];
    float o[kCombineWarps][kDim];
  };

  __device__ __forceinline__ CombineBlock(const FwdParams& params, const SplitGrid& grid_,
                                          Storage& storage)
      : p(params), grid(grid_), smem(storage), index(params, storage.index) {}

  // One row of one item, by a block: its warps share the parts.
  __device__ __forceinline__ void run(bool plain) {
    const PartsOfItem item = grid.num_splits > 0 ? of_fixed() : of_boundary();
    wait_for_primary();
    if (!item.is_split) return;
    const SeqInfo seq = seq_info(p.side_q, p.side_k, item.batch);
    const int row = static_cast<int>(blockIdx.y), r = item.row_tile * kRows + row;
    if (r >= seq.seqlen_q * p.group()) return;
    const SplitParts<kDim> parts(p.workspace, grid.num_slots(p), kRows);
    const float exp_scale = plain ? static_cast<float>(p.softmax_scale) * kLog2e : kLog2e;

    MergedRow<kDim> mine;
    mine.start();
    for (int part = lane_id(); part < item.count; part += kWarpSize)
      if (const int64_t slot = slot_of(item, part); slot >= 0)
        mine.see(parts.row_max[slot * kRows + row]);
    mine.m = warp_max(mine.m);
    for (int part = warp_id(); part < item.count; part += kCombineWarps) {
      const int64_t slot = slot_of(item, part);
      if (slot < 0) continue;
      const int64_t at = slot * kRows + row;
      mine.add(parts.row_max[at], parts.row_sum[at], exp_scale, parts.o + at * kDim);
    }
    if (lane_id() == 0) smem.sum[warp_id()] = mine.sum;
    mine.store(smem.o[warp_id()]);
    __syncthreads();
    if (warp_id() != 0) return;
    MergedRow<kDim> whole;
    whole.start();
    whole.m = mine.m;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) whole.add(mine.m, smem.sum[w], exp_scale, smem.o[w]);
    write_row<In, kDim>(p, item.batch, item.head_k * p.group() + r % p.group(), seq, r / p.group(),
                        plain, whole);
  }

 private:
  __device__ __forceinline__ PartsOfItem of_fixed() const {
    const unsigned tiles = static_cast<unsigned>(grid.max_tiles), item = blockIdx.x;
    const unsigned head = item / tiles, heads = static_cast<unsigned>(p.num_heads_k);
    return {static_cast<int>(head / heads),
            static_cast<int>(head % heads),
            static_cast<int>(item % tiles),
            grid.num_splits,
            0,
            static_cast<int64_t>(item) * grid.num_splits,
            true};
  }

  // The item that the cut before block c = blockIdx.x + 1 lies in, if that is its first cut.
  __device__ __forceinline__ PartsOfItem of_boundary() {
    PartsOfItem none = {};
    const int64_t total = index.total();
    const int c = static_cast<int>(blockIdx.x) + 1;
    const int64_t cut = piece_begin(total, grid.blocks, c);
    if (cut >= total) return none;
    int batch;
    int64_t first;
    index.find(cut, 0, batch, first);
    const Sequence s(p, batch);
    const int each = s.units_of_item();
    const int item = static_cast<int>((cut - first) / each);
    const int64_t begin = first + static_cast<int64_t>(item) * each, end = begin + each;
    const int64_t before = piece_begin(total, grid.blocks, c - 1);
    if (cut == begin || before > begin) return none;
    int last = c;  // pieces that begin inside the item
    while (last + 1 < grid.blocks && piece_begin(total, grid.blocks, last + 1) < end) ++last;
    return {
        batch,        item / s.tiles, item % s.tiles,
        last - c + 2, c - 1,          2 * static_cast<int64_t>(c - 1) + (before == begin ? 0 : 1),
        true};
  }

  // -1: an empty piece.
  __device__ __forceinline__ int64_t slot_of(const PartsOfItem& item, int part) const {
    if (grid.num_splits > 0 || part == 0) return item.first_slot + part;
    const int c = item.first_piece + part;
    const int64_t total = index.total();
    const bool empty = piece_begin(total, grid.blocks, c) == piece_begin(total, grid.blocks, c + 1);
    return empty ? -1 : 2 * static_cast<int64_t>(c);
  }

  const FwdParams& p;
  const SplitGrid& grid;
  Storage& smem;
  Index index;
};

template <typename In, int kDim, int kRows, int kBlockN>
__global__ void __launch_bounds__(kCombineWarps* kWarpSize)
    combine_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid grid,
                   const bool plain) {
  using Block = CombineBlock<In, kDim, kRows, kBlockN>;
  __shared__ typename Block::Storage storage;
  Block(p, grid, storage).run(plain);
}

// Started early where the device can: its blocks find their items while the last pieces end.
template <typename In, int kDim, int kRows, int kBlockN>
void launch_combine(const FwdParams& p, const SplitGrid& grid, bool plain, const Launch& launch) {
  const int64_t items = grid.num_splits > 0
                            ? static_cast<int64_t>(p.batch) * p.num_heads_k * grid.max_tiles
                            : grid.blocks - 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(grid_size(items),
           static_cast<unsigned>(min_of<int64_t>(kRows, int64_t{p.side_q.longest()} * p.group())));
  config.blockDim = dim3(kCombineWarps * kWarpSize);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, &combine_kernel<In, kDim, kRows, kBlockN>, p, grid, plain),
        "a combine kernel");
}

}  // namespace flash::cuda
