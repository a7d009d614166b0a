// Merges rows whose keys were split: over the warps of a block, and over the blocks of a grid.
//
// A part of a row is its maximum m, its sum l of exp(s - m) and its output o, not normalised. Parts
// merge by exp(m - M), M the largest m. (Merging by lse would lose the sum next to a maximum of
// 1e38.)
#pragma once

#include "../../common/softmax.h"
#include "../launch.h"

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

// kCount neighbouring floats that start at a multiple of their number, in the widest loads.
template <int kCount>
__device__ __forceinline__ void copy_floats(float (&to)[kCount], const float* from) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
  struct alignas(4 * kWide) Wide {
    float x[kWide];
  };
#pragma unroll
  for (int n = 0; n < kCount / kWide; ++n) {
    const Wide wide = reinterpret_cast<const Wide*>(from)[n];
#pragma unroll
    for (int d = 0; d < kWide; ++d) to[n * kWide + d] = wide.x[d];
  }
}

// A part of one row in the hands of a warp: a lane has kDim / 32 neighbouring elements.
template <int kDim>
struct RowPart {
  static constexpr int kPerLane = kDim / kWarpSize;

  float m, sum;
  float o[kPerLane];

  __device__ __forceinline__ void load(float part_max, float part_sum, const float* part_o) {
    m = part_max;
    sum = part_sum;
    copy_floats(o, part_o + lane_id() * kPerLane);
  }
  // Row `at` of all slots' rows; one that is not there is a part that saw nothing.
  __device__ __forceinline__ void load(const SplitParts<kDim>& parts, int64_t at, bool is_there) {
    m = is_there ? parts.row_max[at] : -INFINITY;
    sum = is_there ? parts.row_sum[at] : 0.f;
    if (is_there) {
      copy_floats(o, parts.o + at * kDim + lane_id() * kPerLane);
      return;
    }
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) o[d] = 0.f;
  }
};

// The row that parts are merged into, likewise.
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
  __device__ __forceinline__ void add(const RowPart<kDim>& part, float exp_scale) {
    // A part that saw nothing is all zeros, and NaN has reached sum and output alike.
    const float weight = part.m == m ? 1.f : exp2_approx((part.m - m) * exp_scale);
    sum += weight * part.sum;
#pragma unroll
    for (int d = 0; d < kPerLane; ++d) o[d] += weight * part.o[d];
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

// The parts of one run for one member of the teams: consecutive teams, so slots at equal distances,
// but for the first part of a balanced run, which may be at its team's end.
struct PartsOfRun {
  int batch, head_k, row_tile;
  int count;  // 0: there is nothing to merge
  int64_t first_slot;
  int64_t second_slot, step;  // of the second part and those after it

  __device__ __forceinline__ int64_t slot(int part) const {
    return part == 0 ? first_slot : second_slot + (part - 1) * step;
  }
};

constexpr int kCombineWarps = 4;
constexpr int kCombineAhead = 4;

// What a balanced grid has a block for: every run, or every cut between two pieces, if those are
// fewer.
enum class CombineBy { kRuns, kCuts };

// kRowWarps warps share the parts of a row: all of a block where parts are many, one where few.
template <typename In, int kDim, int kRows, int kBlockN, int kRowWarps>
class CombineBlock {
  static_assert(kRowWarps == 1 || kRowWarps == kCombineWarps, "merge_warps joins a whole block");
  static constexpr int kThreads = kCombineWarps * kWarpSize;
  static constexpr int kBlockRows = kCombineWarps / kRowWarps;
  using Sequence = SplitSequence<kRows, kBlockN>;
  using Index = SplitIndex<kRows, kBlockN, kThreads>;

 public:
  struct Storage {
    typename Index::Storage index;
    float sum[kRowWarps > 1 ? kCombineWarps : 1];
    alignas(16) float o[kRowWarps > 1 ? kCombineWarps : 1][kDim];
  };

  __device__ __forceinline__ CombineBlock(const FwdParams& params, const SplitGrid& grid_,
                                          Storage& storage)
      : p(params), grid(grid_), smem(storage), index(params, grid_, storage.index) {}

  // Rows of one run and member; many blocks find nothing to do.
  __device__ __forceinline__ void run(bool plain, CombineBy by) {
    const PartsOfRun run = grid.num_splits > 0      ? of_fixed()
                           : by == CombineBy::kRuns ? of_run()
                                                    : of_cut();
    if (run.count == 0) return;
    const SeqInfo seq = seq_info(p.side_q, p.side_k, run.batch);
    const int row = static_cast<int>(blockIdx.y) * kBlockRows + warp_id() / kRowWarps;
    const int r = run.row_tile * kRows + row;
    const bool is_there = row < kRows && r < seq.seqlen_q * p.group();
    MergedRow<kDim> merged;
    merged.start();
    const float exp_scale = plain ? static_cast<float>(p.softmax_scale) * kLog2e : kLog2e;
    if (is_there) merge_parts(run, row, warp_id() % kRowWarps, exp_scale, merged);
    if (kRowWarps > 1) merge_warps(exp_scale, merged);
    if (is_there && warp_id() % kRowWarps == 0)
      write_row<In, kDim>(p, run.batch, run.head_k * p.group() + r % p.group(), seq, r / p.group(),
                          plain, merged);
  }

 private:
  // This warp's share of a row's parts, kCombineAhead under way at once.
  __device__ __forceinline__ void merge_parts(const PartsOfRun& run, int row, int warp,
                                              float exp_scale, MergedRow<kDim>& mine) {
    const SplitParts<kDim> parts(p.workspace, grid.num_slots(), kRows);
    RowPart<kDim> some[kCombineAhead];
    const auto load = [&](int first) {
#pragma unroll
      for (int n = 0; n < kCombineAhead; ++n) {
        const int part = first + n * kRowWarps;
        some[n].load(parts, run.slot(part) * kRows + row, part < run.count);
      }
    };
    load(warp);  // under way together with the maxima
    for (int part = lane_id(); part < run.count; part += kWarpSize)
      mine.see(parts.row_max[run.slot(part) * kRows + row]);
    mine.m = warp_max(mine.m);
    for (int first = warp; first < run.count;) {
#pragma unroll
      for (int n = 0; n < kCombineAhead; ++n) mine.add(some[n], exp_scale);
      first += kCombineAhead * kRowWarps;
      if (first < run.count) load(first);
    }
  }

  // All warps have the same maximum.
  __device__ __forceinline__ void merge_warps(float exp_scale, MergedRow<kDim>& row) {
    if (lane_id() == 0) smem.sum[warp_id()] = row.sum;
    row.store(smem.o[warp_id()]);
    __syncthreads();
    const float m = row.m;
    row.start();
    row.m = m;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) {
      RowPart<kDim> part;
      part.load(m, smem.sum[w], smem.o[w]);
      row.add(part, exp_scale);
    }
  }

  __device__ __forceinline__ PartsOfRun of_fixed() const {
    const unsigned size = static_cast<unsigned>(grid.team_size());
    const unsigned bands = static_cast<unsigned>(p.num_heads_k / grid.band);
    const unsigned run = blockIdx.x / size;
    PartsOfRun parts = of(static_cast<int>(run / bands), static_cast<int>(run % bands));
    parts.count = grid.num_splits;
    parts.first_slot = grid.slot(static_cast<int>(run) * grid.num_splits, member());
    parts.step = grid.team_size();
    parts.second_slot = parts.first_slot + parts.step;
    return parts;
  }

  // Run number blockIdx.x / team_size(), if it is in parts.
  __device__ __forceinline__ PartsOfRun of_run() {
    const unsigned bands = static_cast<unsigned>(p.num_heads_k / grid.band);
    const unsigned number = blockIdx.x / static_cast<unsigned>(grid.team_size());
    const int batch = static_cast<int>(number / bands);
    const unsigned first = index.first_of(batch);
    const unsigned each = Sequence(p, batch).units_of_run(), band = number % bands;
    if (each == 0) return {};
    return in_pieces(batch, static_cast<int>(band), first + band * each, each);
  }

  // The run that the cut before piece c = team + 1 lies in, if that is its first cut.
  __device__ __forceinline__ PartsOfRun of_cut() {
    const unsigned c = blockIdx.x / static_cast<unsigned>(grid.team_size()) + 1;
    const Pieces pieces(index.total(), grid.teams);
    if (c >= pieces.count) return {};
    const unsigned cut = pieces.begin(c), before = pieces.begin(c - 1);
    int batch;
    unsigned first;
    index.find(cut, batch, first);
    const unsigned each = Sequence(p, batch).units_of_run(), band = (cut - first) / each;
    const unsigned begin = first + band * each;
    if (cut == begin || before > begin) return {};
    return in_pieces(batch, static_cast<int>(band), begin, each);
  }

  // The parts of the run that has units [begin, begin + each).
  __device__ __forceinline__ PartsOfRun in_pieces(int batch, int band, unsigned begin,
                                                  unsigned each) const {
    const Pieces pieces(index.total(), grid.teams);
    const unsigned c = pieces.piece_of(begin), last = pieces.piece_of(begin + each - 1);
    if (c == last) return {};
    PartsOfRun parts = of(batch, band);
    parts.count = static_cast<int>(last - c) + 1;
    parts.first_slot =
        grid.slot(2 * static_cast<int>(c) + (pieces.begin(c) == begin ? 0 : 1), member());
    parts.second_slot = grid.slot(2 * static_cast<int>(c + 1), member());
    parts.step = int64_t{2} * grid.team_size();
    return parts;
  }

  __device__ __forceinline__ int member() const {
    return static_cast<int>(blockIdx.x % static_cast<unsigned>(grid.team_size()));
  }
  __device__ __forceinline__ PartsOfRun of(int batch, int band) const {
    return {batch, band * grid.band + member() / grid.tiles, member() % grid.tiles, 0, 0, 0, 0};
  }

  const FwdParams& p;
  const SplitGrid& grid;
  Storage& smem;
  Index index;
};

template <typename In, int kDim, int kRows, int kBlockN, int kRowWarps>
__global__ void __launch_bounds__(kCombineWarps* kWarpSize)
    combine_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid grid,
                   const bool plain, const CombineBy by) {
  using Block = CombineBlock<In, kDim, kRows, kBlockN, kRowWarps>;
  __shared__ typename Block::Storage storage;
  Block(p, grid, storage).run(plain, by);
}

// Not started early: blocks that wait beside those of the decode kernel may cost long calls some of
// the memory's rate. A build that did so had 0.95 of cuDNN's rate instead of 1.03 (H200, batch 128,
// 128k keys), but differed in more than that.
template <typename In, int kDim, int kRows, int kBlockN>
void launch_combine(const FwdParams& p, const SplitGrid& grid, bool plain, const Launch& launch) {
  const int64_t all_runs = int64_t{p.batch} * (p.num_heads_k / grid.band);
  const int64_t parts = grid.num_splits > 0 ? grid.num_splits : grid.teams / all_runs;  // of a run
  const CombineBy by = all_runs < grid.teams ? CombineBy::kRuns : CombineBy::kCuts;
  const int64_t looks =
      grid.num_splits > 0 || by == CombineBy::kRuns ? all_runs : int64_t{grid.teams} - 1;
  const int rows =
      static_cast<int>(min_of<int64_t>(kRows, int64_t{p.side_q.longest()} * p.group()));
  const auto launch_with = [&](auto row_warps) {
    constexpr int kRowWarps = decltype(row_warps)::value;
    const dim3 blocks(grid_size(looks * grid.team_size()),
                      static_cast<unsigned>(ceil_div(rows, kCombineWarps / kRowWarps)));
    combine_kernel<In, kDim, kRows, kBlockN, kRowWarps>
        <<<blocks, kCombineWarps * kWarpSize, 0, static_cast<cudaStream_t>(launch.stream)>>>(
            p, grid, plain, by);
    check(cudaGetLastError(), "a combine kernel");
  };
  if (parts > kCombineAhead)
    launch_with(Constant<kCombineWarps>{});
  else
    launch_with(Constant<1>{});
}

}  // namespace flash::cuda
