// Forward for few query rows over many keys: decoding, one token or several, at the memory's speed.
//
// The rows of a tile are the query rows of one key head: kRows pairs (token, query head of the
// group), so that a group shares one read of K and V. Warps share the rows and split the keys: warp
// w reads every kWarps-th tile of kKeys keys through a ring of stages of its own and waits for its
// own copies only. There is no block barrier between two tiles; the warps' rows are merged when the
// block's part of a run ends. Which keys a block reads, and where parts go, is split.cuh's;
// combine.cuh merges the parts.
//
//            keys ------------------------------------------------>
//   rows     | w0 | w1 | w2 | w3 | w0 | w1 | w2 | w3 | w0 | ...
//   (16)     |kKeys|                                          each warp: O, maxima, sums
//
// Who waits: a lane for its own copies, then its warp (warp_barrier), once a tile. The block waits
// for Q at the beginning of a part and for all warps' rows at its end.
#pragma once

#include "../../common/score.h"
#include "../../common/softmax.h"
#include "../launch.h"
#include "../primitives/dependents.h"

#include <config.h>
#include <copy.h>
#include <fragment.h>

#include "combine.cuh"
#include "kinds.h"
#include "online.cuh"
#include "split.cuh"

namespace flash::cuda {

template <typename In_, int kDim_, int kSmemKB, int kRows_, ScoreKind kScore_, KeysKind kKeys_>
struct DecodeTraits {
  using In = In_;
  using Shape = DecodeConfig<kDim_, kSmemKB>;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kThreads = Shape::kWarps * kWarpSize;
  static constexpr ScoreKind kScore = kScore_;
  static constexpr KeysKind kKeysKind = kKeys_;
  static constexpr int kBlockN = Shape::kWarps * Shape::kKeys;
};

template <typename Traits>
struct DecodeStorage {
  using Shape = typename Traits::Shape;
  static constexpr int kOStride = Traits::kDim + 8;  // floats; rows lie in different banks
  struct Stage {
    char k[Shape::kKeys * Traits::kDim * 2];
    char v[Shape::kKeys * Traits::kDim * 2];
  };
  union Warp {
    Stage stage[Shape::kStages];
    float o[Traits::kRows * kOStride];  // at the end of a part
  };
  char q[Traits::kRows * Traits::kDim * 2];
  Warp warp[Shape::kWarps];
  float row_max[Shape::kWarps][Traits::kRows];
  float row_sum[Shape::kWarps][Traits::kRows];
  typename SplitIndex<Traits::kRows, Traits::kBlockN, Traits::kThreads>::Storage index;
};

// Where the keys of a warp's tile lie: lane l looks up key l of the tile one tile ahead, so that no
// copy waits for the page table.
template <KeysKind kKeys>
struct KeyPlaces;

template <>
struct KeyPlaces<KeysKind::kRows> {
  __device__ __forceinline__ void look_up(const AttnParams&, int, int first, int, Range) {
    first_ = first;
  }
  __device__ __forceinline__ int64_t offset(const View& view, int key) const {
    return (first_ + key) * view.row_stride;
  }

 private:
  int first_;
};

template <>
struct KeyPlaces<KeysKind::kPages> {
  // Also serves keys that are not in pages, as one page that begins with the sequence.
  __device__ __forceinline__ void look_up(const AttnParams& p, int batch, int first, int count,
                                          Range seen) {
    const int key = first + lane_id() % count;
    page_ = 0;
    row_ = key;
    if (!p.pages.is_on()) return;
    const int index = key / p.pages.page_size;
    row_ = key - index * p.pages.page_size;
    page_ = key >= seen.begin && key < seen.end ? p.pages.page(batch, index) : 0;
  }
  __device__ __forceinline__ int64_t offset(const View& view, int key) const {
    return from_lane(page_, key) * view.batch_stride + from_lane(row_, key) * view.row_stride;
  }

 private:
  int page_, row_;
};

template <typename Traits>
class DecodeBlock {
  using In = typename Traits::In;
  using Shape = typename Traits::Shape;
  using Storage = DecodeStorage<Traits>;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kWarps = Shape::kWarps;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kSteps = kDim / 16;
  static constexpr bool kPlain = Traits::kScore == ScoreKind::kPlain;
  static constexpr bool kDense = Traits::kKeysKind == KeysKind::kRows;
  using AccS = Accumulator<kRows, kKeys>;
  using AccO = Accumulator<kRows, kDim>;
  static constexpr int kSlots = AccO::kRowsPerThread;
  // 16-byte chunks of a row, and rows that a warp copies at once.
  static constexpr int kChunks = SmemTile<kDim>::kChunks;
  static constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static constexpr int kRowStep = kWarpSize / kLanes;
  using Sequence = SplitSequence<kRows, kBlockN>;
  using Index = SplitIndex<kRows, kBlockN, Traits::kThreads>;

 public:
  __device__ __forceinline__ DecodeBlock(const FwdParams& params, const SplitGrid& grid_,
                                         Storage& storage)
      : p(params), grid(grid_), smem(storage) {}

  // The schedule of a block: one part of a run after the other.
  __device__ __forceinline__ void run() {
    const unsigned size = static_cast<unsigned>(grid.team_size());
    const unsigned team = blockIdx.x / size;
    const int member = static_cast<int>(blockIdx.x % size);
    if (grid.num_splits > 0)
      run_fixed(team, member);
    else
      run_balanced(team, member);
  }

 private:
  // Teams of a run's parts stand beside each other.
  __device__ __forceinline__ void run_fixed(unsigned team, int member) {
    const unsigned n = static_cast<unsigned>(grid.num_splits);
    const unsigned bands = static_cast<unsigned>(p.num_heads_k / grid.band);
    const unsigned split = team % n, run = team / n;
    Segment segment =
        segment_of(static_cast<int>(run / bands), static_cast<int>(run % bands), member);
    const Sequence s(p, segment.batch);
    if (segment.row_tile >= s.tiles) return;
    segment.blocks = split_blocks(s.blocks, static_cast<int>(split), grid.num_splits);
    segment.slot = n == 1 ? -1 : grid.slot(static_cast<int>(team), member);
    read_part(segment);
  }

  __device__ __forceinline__ void run_balanced(unsigned team, int member) {
    Index index(p, grid, smem.index);
    const Pieces pieces(index.total(), grid.teams);
    if (team >= pieces.count) return;
    const unsigned begin = pieces.begin(team), end = pieces.begin(team + 1);
    int batch;
    unsigned first;  // units before the sequence
    index.find(begin, batch, first);
    for (unsigned at = begin; at < end;) {
      const Sequence s(p, batch);
      const unsigned units = index.units_of(batch);
      if (at >= first + units) {
        first += units;
        ++batch;
        continue;
      }
      const unsigned each = s.units_of_run(), band = (at - first) / each;
      const unsigned from = at - first - band * each, count = min_of(each - from, end - at);
      Segment segment = segment_of(batch, static_cast<int>(band), member);
      const int first_block = s.blocks.begin + static_cast<int>(from);
      segment.blocks = intersect({first_block, first_block + static_cast<int>(count)}, s.blocks);
      const int row = 2 * static_cast<int>(team) + (at == begin ? 0 : 1);
      segment.slot = count == each ? -1 : grid.slot(row, member);
      if (segment.row_tile < s.tiles) read_part(segment);
      at += count;
    }
  }

  __device__ __forceinline__ Segment segment_of(int batch_, int band, int member) const {
    return {batch_, band * grid.band + member / grid.tiles, member % grid.tiles, {0, 0}, -1};
  }

  __device__ __forceinline__ void read_part(const Segment& segment) {
    start(segment);
    const int count = segment.blocks.size();
    if (count > 0) {
      for (int i = 0; i < kStages - 1; ++i) load_kv(i, count);
      copy_wait<kStages - 1>();
      __syncthreads();  // Q has landed
      load_queries();
      for (int i = 0; i < count; ++i) {
        copy_wait<kStages - 2>();
        warp_barrier();  // tile i has landed; every lane has left the stage that is filled next
        load_kv(i + kStages - 1, count);
        step(i);
      }
      copy_wait<0>();
      warp_barrier();
    }
    finish(segment);
    __syncthreads();  // the next part's copies go where these rows lie
  }

  __device__ __forceinline__ void start(const Segment& segment) {
    batch = segment.batch;
    head_k = segment.head_k;
    seq = seq_info(p.side_q, p.side_k, batch);
    mask = {seq.seqlen_q, seq.seqlen_k, p.window_left, p.window_right, seq.first_k};
    first_row = segment.row_tile * kRows;
    num_rows = min_of(kRows, seq.seqlen_q * p.group() - first_row);
    tokens = {first_row / p.group(), (first_row + num_rows - 1) / p.group() + 1};
    seen = intersect(mask.keys_of(tokens),
                     {segment.blocks.begin * kBlockN, segment.blocks.end * kBlockN});
    first_key = segment.blocks.begin * kBlockN + warp_id() * kKeys;
    const int chunk = lane_id() % kLanes;
    k_data = head_data(p.k, chunk, p.head_dim, k_bytes);
    v_data = head_data(p.v, chunk, p.head_dim_v, v_bytes);
    if (segment.blocks.size() > 0) copy_q();
    copy_commit();
    if (!kDense) places.look_up(p, batch, first_key, kKeys, seen);
    acc_o.clear();
    online.start(kPlain ? static_cast<float>(p.softmax_scale) * kLog2e : kLog2e);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      token[slot] = min_of((first_row + AccO::row(slot)) / p.group(), seq.seqlen_q - 1);
  }

  // This lane's chunk of the head's rows, and how many bytes of it exist.
  __device__ __forceinline__ const char* head_data(const View& view, int chunk, int dim,
                                                   int& bytes) const {
    bytes = clamp_to(2 * dim - 16 * chunk, 0, 16);
    const int64_t first =
        p.pages.is_on() ? view.at(0, 0, head_k) : view.at(batch, seq.offset_k, head_k);
    return static_cast<const char*>(view.data) + 2 * first + (bytes > 0 ? 16 * chunk : 0);
  }

  // Rows past the last are zero-filled, like the rest of a short head.
  __device__ __forceinline__ void copy_q() {
    for (int at = threadIdx.x; at < kRows * kChunks; at += Traits::kThreads) {
      const int row = at / kChunks, chunk = at % kChunks;
      const int r = first_row + min_of(row, num_rows - 1);
      const int bytes = row < num_rows ? clamp_to(2 * p.head_dim - 16 * chunk, 0, 16) : 0;
      const int64_t from =
          p.q.at(batch, seq.offset_q + r / p.group(), head_k * p.group() + r % p.group());
      cp_async_16(smem_address(smem.q) + SmemTile<kDim>::offset(row, chunk),
                  static_cast<const char*>(p.q.data) + 2 * from + (bytes > 0 ? 16 * chunk : 0),
                  bytes);
    }
  }

  __device__ __forceinline__ void load_queries() {
    if (!kQInRegisters) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_a<kDim, kRows>(q[k], smem_address(smem.q), 0, k);
  }

  // Copies this warp's tile i of `count`, if there is one; a group in any case, so that waiting
  // counts the same.
  __device__ __forceinline__ void load_kv(int i, int count) {
    if (i < count) {
      typename Storage::Stage& stage = smem.warp[warp_id()].stage[i % kStages];
      const int first = first_key + i * kBlockN;
      if (kDense) places.look_up(p, batch, first, kKeys, seen);
      copy_keys(stage, first);
      if (!kDense && i + 1 < count) places.look_up(p, batch, first + kBlockN, kKeys, seen);
    }
    copy_commit();
  }

  // Keys that no row of the tile sees are zero-filled and never read.
  __device__ __forceinline__ void copy_keys(typename Storage::Stage& stage, int first) {
    const int chunk = lane_id() % kLanes, row = lane_id() / kLanes;
    const bool all = first >= seen.begin && first + kKeys <= seen.end;
    const uint32_t to_k = smem_address(stage.k), to_v = smem_address(stage.v);
#pragma unroll
    for (int r = 0; r < kKeys; r += kRowStep) {
      const int key = first + row + r;
      const bool is_seen = all || (key >= seen.begin && key < seen.end);
      const int64_t from_k = places.offset(p.k, row + r), from_v = places.offset(p.v, row + r);
      if (kChunks < kLanes && chunk >= kChunks) continue;
      const int at = SmemTile<kDim>::offset(row + r, chunk);
      cp_async_16(to_k + at, is_seen ? k_data + 2 * from_k : k_data, is_seen ? k_bytes : 0);
      cp_async_16(to_v + at, is_seen ? v_data + 2 * from_v : v_data, is_seen ? v_bytes : 0);
    }
  }

  // One tile of this warp.
  __device__ __forceinline__ void step(int i) {
    typename Storage::Stage& stage = smem.warp[warp_id()].stage[i % kStages];
    const int first = first_key + i * kBlockN;
    AccS acc_s;
    acc_s.clear();
    gemm_qk(acc_s, smem_address(stage.k));
    score_and_mask(acc_s, first);
    online.update(acc_s, acc_o);
    const uint32_t v = smem_address(stage.v);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) mma_ab<In, kDim>(acc_o, as_operand<In>(acc_s, k), v, k);
  }

  __device__ __forceinline__ void gemm_qk(AccS& acc_s, uint32_t k_tile) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (!kQInRegisters) load_a<kDim, kRows>(q[0], smem_address(smem.q), 0, k);
      mma_abt<In, kDim>(acc_s, q[kQInRegisters ? k : 0], k_tile, k);
    }
  }

  __device__ __forceinline__ void score_and_mask(AccS& acc_s, int first) {
    if (!kPlain) modify(acc_s, first);
    if (!mask.is_edge(tokens, {first, first + kKeys})) return;
    acc_s.for_each([&](float& s, int slot, int col) {
      s = mask.sees(token[slot], first + col) ? s : -INFINITY;
    });
  }

  // A row's modifiers are those of its query head. Rows and keys that do not exist take the last
  // one's: the mask and `num_rows` hide them.
  __device__ __forceinline__ void modify(AccS& acc_s, int first) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int row = min_of(first_row + AccS::row(slot), first_row + num_rows - 1);
      const int head = head_k * p.group() + row % p.group();
      const Score<float> score = make_score<float>(
          static_cast<float>(p.softmax_scale), static_cast<float>(p.softcap),
          p.bias.of(batch, head), p.alibi_slopes.of(batch, head, 0.f), mask.diagonal());
      score.for_each_active([&](auto change) {
        acc_s.for_each([&](float& s, int other, int col) {
          if (other == slot) s = change(s, token[slot], min_of(first + col, seq.seqlen_k - 1));
        });
      });
    }
  }

  // The warps' rows into shared memory, merged from there: to the output, or to a slot.
  __device__ __forceinline__ void finish(const Segment& segment) {
    typename Storage::Warp& mine = smem.warp[warp_id()];  // its ring is empty
    acc_o.for_each([&](float o, int slot, int col) {
      if (AccO::row(slot) < num_rows) mine.o[AccO::row(slot) * Storage::kOStride + col] = o;
    });
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float sum = online.total(slot);
      if (!AccO::owns_row()) continue;
      smem.row_max[warp_id()][AccO::row(slot)] = online.row_max[slot];
      smem.row_sum[warp_id()][AccO::row(slot)] = sum;
    }
    __syncthreads();
    for (int row = warp_id(); row < num_rows; row += kWarps) merge_row(segment, row);
  }

  // One warp merges what all warps have of a row.
  __device__ __forceinline__ void merge_row(const Segment& segment, int row) {
    MergedRow<kDim> merged;
    merged.start();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) merged.see(smem.row_max[w][row]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      RowPart<kDim> part;
      part.load(smem.row_max[w][row], smem.row_sum[w][row],
                smem.warp[w].o + row * Storage::kOStride);
      merged.add(part, online.exp_scale);
    }
    if (segment.slot >= 0) {
      merged.store(SplitParts<kDim>(p.workspace, grid.num_slots(), kRows), segment.slot, row);
      return;
    }
    const int r = first_row + row;
    write_row<In, kDim>(p, batch, head_k * p.group() + r % p.group(), seq, r / p.group(), kPlain,
                        merged);
  }

  static constexpr bool kQInRegisters = kRows * kDim <= 16 * 128;

  const FwdParams& p;
  const SplitGrid& grid;
  Storage& smem;

  // Of the part at hand.
  int batch, head_k;
  SeqInfo seq;
  Mask mask;
  int first_row, num_rows;  // rows of the item's tile, counted over (token, head of the group)
  Range tokens;             // of those rows
  Range seen;               // keys that they see, within the part
  int first_key;            // of this warp's first tile
  int token[kSlots];
  const char *k_data, *v_data;
  int k_bytes, v_bytes;
  KeyPlaces<Traits::kKeysKind> places;

  OperandA<kRows> q[kQInRegisters ? kSteps : 1];
  AccO acc_o;
  OnlineRows<AccS, AccO, Rescale::kWhenMoved> online;
};

template <typename Traits, int kSmemBytes>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Shape::kMinBlocks)
    decode_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid grid) {
  extern __shared__ __align__(128) char storage[];
  wait_for_primary();  // an append may be ahead, and started this grid early
  DecodeBlock<Traits>(p, grid, *reinterpret_cast<DecodeStorage<Traits>*>(storage)).run();
}

// Where a score product and a row of Q, O fit into registers, 32 rows; else 16 and more tiles.
constexpr int decode_rows(int dim, bool plain, int64_t rows) {
  return rows > 16 && dim <= 128 && plain ? 32 : 16;
}

// The most key heads of a team; more would leave too few teams to cut the keys for.
constexpr int kMostBand = 16;

template <typename Shape>
SplitGrid decode_grid(const FwdParams& p, int rows_of_tile) {
  constexpr int kBlockN = Shape::kWarps * Shape::kKeys;
  const int64_t rows = int64_t{p.side_q.longest()} * p.group();
  int band = min_of(p.num_heads_k, kMostBand);
  while (p.num_heads_k % band != 0) --band;
  SplitGrid grid = {p.num_splits, 1, band, static_cast<int>(ceil_div<int64_t>(rows, rows_of_tile))};
  const int64_t runs = int64_t{p.batch} * (p.num_heads_k / band);
  if (p.num_splits > 0) {
    grid_size(runs * p.num_splits * grid.team_size());
    grid.teams = static_cast<int>(runs * p.num_splits);
    return grid;
  }
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  const int64_t blocks =
      int64_t{device_attribute(cudaDevAttrMultiProcessorCount, device)} * Shape::kMinBlocks;
  const int64_t units = runs * (ceil_div(p.side_k.longest(), kBlockN) + 1);
  grid_size(units);
  grid.teams = static_cast<int>(clamp_to<int64_t>(units / Shape::kLeastUnits, 1,
                                                  max_of<int64_t>(blocks / grid.team_size(), 1)));
  return grid;
}

template <typename In, int kDim, int kSmemKB>
size_t decode_workspace(const FwdParams& p) {
  using Shape = DecodeConfig<kDim, kSmemKB>;
  const int rows = decode_rows(kDim, is_plain(p), int64_t{p.side_q.longest()} * p.group());
  const SplitGrid grid = decode_grid<Shape>(p, rows);
  return grid.is_split() ? SplitParts<kDim>::bytes(grid.num_slots(), rows) : 0;
}

template <typename Traits>
void launch_decode(const FwdParams& p, const Launch& launch) {
  constexpr int kSmemBytes = sizeof(DecodeStorage<Traits>);
  const auto kernel = &decode_kernel<Traits, kSmemBytes>;
  allow_smem(reinterpret_cast<const void*>(kernel), kSmemBytes);
  const SplitGrid grid = decode_grid<typename Traits::Shape>(p, Traits::kRows);
  launch_early(kernel, dim3(grid_size(int64_t{grid.teams} * grid.team_size())), Traits::kThreads,
               kSmemBytes, launch.stream, "a decode kernel", p, grid);
  if (grid.is_split())
    launch_combine<typename Traits::In, Traits::kDim, Traits::kRows, Traits::kBlockN>(
        p, grid, Traits::kScore == ScoreKind::kPlain, launch);
}

// The kernel for the run-time features of a problem. Modified scores take the general way to keys.
template <typename In, int kDim, int kSmemKB>
void decode(const FwdParams& p, const Launch& launch) {
  const int rows = decode_rows(kDim, is_plain(p), int64_t{p.side_q.longest()} * p.group());
  const auto run = [&](auto kRows, auto score, auto keys) {
    launch_decode<DecodeTraits<In, kDim, kSmemKB, decltype(kRows)::value, decltype(score)::value,
                               decltype(keys)::value>>(p, launch);
  };
  const auto with_rows = [&](auto kRows) {
    if (p.pages.is_on())
      run(kRows, Constant<ScoreKind::kPlain>{}, Constant<KeysKind::kPages>{});
    else
      run(kRows, Constant<ScoreKind::kPlain>{}, Constant<KeysKind::kRows>{});
  };
  if (!is_plain(p))
    run(Constant<16>{}, Constant<ScoreKind::kModified>{}, Constant<KeysKind::kPages>{});
  else if (rows == 16)
    with_rows(Constant<16>{});
  else if constexpr (kDim <= 128)
    with_rows(Constant<32>{});
}

}  // namespace flash::cuda
