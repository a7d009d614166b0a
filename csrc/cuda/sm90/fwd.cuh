// Forward of the Hopper class: FlashAttention-3's schedule on wgmma, with TMA copies, persistent
// blocks, and tiles that follow each other without a gap.
//
// A block is one producer warp and kConsumers warpgroups of 64 query rows each. It walks a list of
// tiles (64 kConsumers query rows of one head), and each tile's blocks of kBlockN keys. For a
// consumer this is one stream of key blocks: while it computes the softmax of one block, the tensor
// cores run the product with V of the block before, also where the two belong to different tiles.
//
// Who waits for whom (docs/hopper.md has the figure):
//
// The producer waits for empty stages of Q, K, V, which consumers' warps free when the products
// that read them are done. A consumer waits for full stages, and for its turn at the tensor cores,
// which the consumer before it passes on when its own products are issued: so one's softmax lies
// under the others' products.
#pragma once

#include "../../common/score.h"
#include "../../common/softmax.h"
#include "../../params.h"

#include "../launch.h"
#include "../primitives/mbarrier.h"
#include "../primitives/tma.h"

#include "config.h"
#include "fragment.h"
#include "pipeline.h"
#include "work.h"

namespace flash::cuda::sm90 {

// ---- consumer ----------------------------------------------------------------------------------

template <typename Traits>
class FwdConsumer {
  using In = typename Traits::In;
  using Shape = typename Traits::Shape;
  using Storage = FwdStorage<Traits>;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kDimV = Traits::kDimV;
  static constexpr bool kPlain = Traits::kScore == ScoreKind::kPlain;
  static constexpr bool kReleaseLate = Shape::kQStages > 1;
  static constexpr bool kTurns = Shape::kPingPong == PingPong::kOn;

 public:
  __device__ __forceinline__ FwdConsumer(const FwdParams& params, const FwdMaps& tensor_maps,
                                         Storage& storage, int consumer_)
      : p(params),
        maps(tensor_maps),
        exp_scale(tensor_maps.exp_scale),
        smem(storage),
        consumer(consumer_) {}

  // The schedule. S is of the block that the stream is at, P of the one before it, until P has been
  // made of S.
  //
  // One loop that is never entered again: ptxas then knows that the warp stays together in it,
  // guards no branch and keeps the products' descriptors in uniform registers.
  __device__ __forceinline__ void run() {
    if (!next_tile()) return;
    start();
    gemm_qk();
    wgmma_wait<0>();
    pin(acc_s.x);
    release_k();
    open_rows();
    score_and_mask();
    online_softmax();
    to_operand<In>(probs, acc_s);
    while (advance()) {
      wait_turn();
      gemm_qk();
      gemm_pv(kBehind);
      pass_turn();
      free_stored();
      wgmma_wait<1>();
      pin(acc_s.x);
      release_k();
      if (crossing) open_rows();
      score_and_mask();
      online_softmax();
      wgmma_wait<0>();
      pin(acc_o.x);
      pin(acc_s.x);
      release_v(kBehind);
      if (crossing)
        finish(tile_count - 1);
      else
        rescale();
      to_operand<In>(probs, acc_s);  // now: the product just waited for has read the old ones
    }
    gemm_pv(kHere);
    close_rows();
    wgmma_wait<0>();
    pin(acc_o.x);
    finish(tile_count - 1);
    free_stored();
    end_turns();
  }

 private:
  // ---- turns at the tensor cores ---------------------------------------------------------------

  enum : int { kTurnBarrier = 1, kOwnBarrier = kTurnBarrier + Traits::kConsumers };

  __device__ __forceinline__ void wait_turn() {
    if (kTurns) named_sync(kTurnBarrier + consumer, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() {
    const int next = consumer == Traits::kConsumers - 1 ? 0 : consumer + 1;
    if (kTurns) named_arrive(kTurnBarrier + next, 2 * kWarpgroup);
  }
  // The first turn is the first consumer's; it takes up the one that is left over at the end.
  __device__ __forceinline__ void end_turns() {
    if (consumer == 0) wait_turn();
  }

  // ---- the stream of key blocks ----------------------------------------------------------------

  // Whether P's block is the stream's or the one before it.
  enum Distance : int { kHere = 0, kBehind = 1 };

  __device__ __forceinline__ void start() {
    if (consumer == Traits::kConsumers - 1) pass_turn();
    acc_o.clear();
  }

  // To the next block of keys; false at the end of the list. `crossing`: it is of another tile.
  __device__ __forceinline__ bool advance() {
    crossing = n_block == first_block;
    if (crossing) return next_tile();
    --n_block;
    return true;
  }

  // False at the end of the list.
  __device__ __forceinline__ bool next_tile() {
    // The producer may need the memory of the last O for this tile's Q.
    free_stored();
    ++tile_count;
    clears <<= 1;
    mbarrier_wait(smem_of(&smem.q_full[stage_of<Shape::kQStages>(tile_count)]),
                  parity_of<Shape::kQStages>(tile_count));
    const Tile& tile = tile_of(tile_count);
    if (tile.head < 0) return false;
    n_block = tile.last_block;
    first_block = tile.first_block;
    clears |= tile.clears;
    const Mask mask = mask_of(tile);
    const Range rows = rows_of(tile);
    unmasked = {mask.first_key(rows.end - 1), mask.end_key(rows.begin)};
    return true;
  }

  __device__ __forceinline__ const Tile& tile_of(unsigned count) const {
    return smem.tile[count % Storage::kTiles];
  }

  __device__ __forceinline__ Mask mask_of(const Tile& tile) const {
    return {tile.seqlen_q, tile.seqlen_k, p.window_left, p.window_right};
  }
  // This consumer's rows, some perhaps past the end of the sequence.
  __device__ __forceinline__ Range rows_of(const Tile& tile) const {
    const int first = tile.first_row + consumer * kWarpgroupRows;
    return {first, first + kWarpgroupRows};
  }

  __device__ __forceinline__ void release(uint64_t& barrier) {
    if (lane_id() == 0) mbarrier_arrive(smem_of(&barrier));
  }
  __device__ __forceinline__ void release_k() {
    release(smem.k_empty[stage_of<Shape::kStages>(step++)]);
    // The tile's last product with Q; with two stages of Q, its memory first takes O.
    if (!kReleaseLate && n_block == first_block) release_q(tile_count);
  }
  // After release_k, so of the step before.
  __device__ __forceinline__ void release_v(Distance distance) {
    release(smem.v_empty[stage_of<Shape::kStages>(step - 1 - distance)]);
  }
  __device__ __forceinline__ void release_q(unsigned count) {
    release(smem.q_empty[stage_of<Shape::kQStages>(count)]);
  }

  // ---- products --------------------------------------------------------------------------------

  __device__ __forceinline__ void gemm_qk() {
    const int stage = stage_of<Shape::kStages>(step);
    mbarrier_wait(smem_of(&smem.k_full[stage]), parity_of<Shape::kStages>(step));
    const uint32_t q_tile = smem_of(smem.q[stage_of<Shape::kQStages>(tile_count)]),
                   k_tile = smem_of(smem.k[stage]);
    pin(acc_s.x);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Wgmma<In, kBlockN>::template ss<Major::kK, Major::kK>(
          acc_s.x, QTile::along_dim(q_tile, consumer * kWarpgroupRows, i),
          KTile::along_dim(k_tile, 0, i), i > 0);
    wgmma_commit();
  }

  // Before release_k where the stream is a block ahead, after it where it is not: the same step.
  __device__ __forceinline__ void gemm_pv(Distance distance) {
    const int stage = stage_of<Shape::kStages>(step - 1);
    mbarrier_wait(smem_of(&smem.v_full[stage]), parity_of<Shape::kStages>(step - 1));
    if (clears >> crossing & 1) clear_v(smem.v[stage], distance);
    const uint32_t v_tile = smem_of(smem.v[stage]);
    pin(acc_o.x);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i)
      Wgmma<In, kDimV>::template rs<Major::kMN>(acc_o.x, probs.r[i], VTile::along_rows(v_tile, i),
                                                true);
    wgmma_commit();
  }

  // Every consumer does it for itself: they write the same zeros, and none waits for another.
  __device__ __forceinline__ void clear_v(char* v_tile, Distance distance) {
    const Tile& tile = tile_of(tile_count - crossing);
    const int key = (crossing ? tile.first_block : n_block + distance) * kBlockN;
    const Range keep = {tile.keep_begin - key, tile.keep_end - key};
    if (keep.begin <= 0 && keep.end >= kBlockN) return;
    clear_rows_outside<kBlockN, kDimV>(v_tile, keep);
    async_proxy_fence();
    named_sync(kOwnBarrier + consumer, kWarpgroup);
  }

  // ---- scores ----------------------------------------------------------------------------------

  __device__ __forceinline__ void score_and_mask() {
    if (!kPlain) {
      const float scale = static_cast<float>(p.softmax_scale);
      softcap().for_each_active(scale, [&](auto modify) {
        acc_s.for_each([&](float& s, int, int) { s = modify(s, 0, 0); });
      });
    }
    // Both sides apart: an edge of one kind costs two instructions a score, and a block in between
    // none.
    const Range keys = block_range(n_block, kBlockN);
    if (keys.end > unmasked.end) {
      mask_scores([](const Mask& mask, int i) { return mask.end_key(i); },
                  [](int col, int end) { return col < end; });
    }
    if (keys.begin < unmasked.begin) {
      mask_scores([](const Mask& mask, int i) { return mask.first_key(i); },
                  [](int col, int first) { return col >= first; });
    }
  }

  __device__ __forceinline__ Chain<float, Softcap<float>> softcap() const {
    const float cap = static_cast<float>(p.softcap);
    return {{cap, cap > 0 ? 1 / cap : 0}, {}};
  }

  template <typename Limit, typename Sees>
  __device__ __forceinline__ void mask_scores(Limit limit_of, Sees sees) {
    const Tile& tile = tile_of(tile_count);
    const Mask mask = mask_of(tile);
    int limit[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      limit[slot] = limit_of(mask, rows_of(tile).begin + row_of(slot)) - n_block * kBlockN;
    acc_s.for_each(
        [&](float& s, int slot, int col) { s = sees(col, limit[slot]) ? s : -INFINITY; });
  }

  // s becomes p = exp(s - maximum) in powers of two. The maximum is followed at once and not, as
  // would be cheaper, when it has grown by a factor: a row's largest p is then 1, which P holds
  // exactly.
  __device__ __forceinline__ void online_softmax() {
    float m[kSlots];
    moved = row_maxima(acc_s, m, [&](const float (&most)[kSlots]) {
      return exceeds(most[0], 0) || exceeds(most[1], 1);
    });
    if (moved) move_reference(m);
    float shift[kSlots] = {shift_of(reference[0]), shift_of(reference[1])};
    if (huge) settle_huge(shift);
    float sum[kSlots][2] = {};  // two chains of additions each
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      float& s = acc_s.x[i];
      s = exp2_approx(s * exp_scale - shift[i / 2 % 2]);
      sum[i / 2 % 2][i % 2] += s;
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) add_to_row(slot, sum[slot][0] + sum[slot][1]);
  }

  // NaN too: a row that has one is NaN.
  __device__ __forceinline__ bool exceeds(float m, int slot) const {
    return !(m <= reference[slot]);
  }

  __device__ __forceinline__ void move_reference(const float (&m)[kSlots]) {
    bool any_huge = false;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float from = reference[slot], to = exceeds(m[slot], slot) ? m[slot] : from;
      const float distance =
          is_huge(from) || is_huge(to) ? (from - to) * exp_scale : shift_of(from) - shift_of(to);
      factor[slot] = from == to ? 1.f : from == -INFINITY ? 0.f : exp2_approx(distance);
      reference[slot] = to;
      row_sum[slot] *= factor[slot];
      row_lost[slot] *= factor[slot];
      any_huge |= is_huge(to);
    }
    huge = warp_any(any_huge);
  }

  __device__ __forceinline__ void rescale() {
    if (!moved) return;
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) acc_o.x[i] *= factor[i / 2 % 2];
  }

  // The reference rounded in powers of two, 0 while nothing has been seen (s - reference would be
  // NaN). Corrections are made of it, so that its rounding is nobody's error.
  __device__ __forceinline__ float shift_of(float m) const {
    return m == -INFINITY ? 0.f : m * exp_scale;
  }
  // Where that rounding alone is more than any exponential.
  __device__ __forceinline__ bool is_huge(float m) const {
    return fabsf(m * exp_scale) > kHuge && m != -INFINITY;
  }

  // Subtracts first.
  __device__ __forceinline__ void settle_huge(float (&shift)[kSlots]) {
    acc_s.for_each([&](float& s, int slot, int) {
      if (is_huge(reference[slot])) s -= reference[slot];
    });
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      if (is_huge(reference[slot])) shift[slot] = 0.f;
  }

  // Kahan's sum, once a block: over millions of keys of like weight the roundings of a plain float
  // sum all go the same way (4M keys: 1 % of the sum).
  __device__ __forceinline__ void add_to_row(int slot, float x) {
    const float y = x - row_lost[slot];
    const float sum = row_sum[slot] + y;
    row_lost[slot] = (sum - row_sum[slot]) - y;
    row_sum[slot] = sum;
  }

  // ---- rows ------------------------------------------------------------------------------------

  // Statistics of a finished tile are kept until its last product is done.
  __device__ __forceinline__ void close_rows() {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      done_max[slot] = is_huge(reference[slot]) || reference[slot] == -INFINITY
                           ? reference[slot] * (kPlain ? static_cast<float>(p.softmax_scale) : 1.f)
                           : shift_of(reference[slot]) * kLn2;
      done_sum[slot] = row_sum[slot];
    }
  }
  __device__ __forceinline__ void open_rows() {
    close_rows();
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      reference[slot] = -INFINITY;
      row_sum[slot] = row_lost[slot] = 0.f;
    }
    huge = false;
  }

  __device__ __forceinline__ void finish(unsigned at) {
    const Tile& tile = tile_of(at);
    const SeqInfo seq = {tile.offset_q, tile.offset_k, tile.seqlen_q, tile.seqlen_k};
    const float sink = p.sinks.of(tile.batch, tile.head, -INFINITY);
    float* lse = static_cast<float*>(p.lse) + p.row_index(tile.batch, tile.head, seq, 0);
    float scale[kSlots];
    int row[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float sum = reduce_row(done_sum[slot], [](float a, float b) { return a + b; });
      const RowEnd<float> end = finish_row(done_max[slot], sum, sink);
      row[slot] = rows_of(tile).begin + row_of(slot);
      if (row[slot] < tile.seqlen_q && owns_row()) lse[row[slot]] = end.lse;
      scale[slot] = end.out_scale;
    }
    // A map's box ends where the tensor does. Where rows that follow belong to somebody else, or
    // the rows of out fit no map, threads write what is there.
    const bool whole = rows_of(tile).end <= tile.seqlen_q || tile.seqlen_q == p.side_q.total;
    if (kReleaseLate && maps.stores_out && whole) {
      store_by_map(tile, at, scale);
    } else {
      char* data[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot)
        data[slot] = row[slot] < tile.seqlen_q
                         ? static_cast<char*>(p.out.data) +
                               2 * p.out.at(tile.batch, tile.offset_q + row[slot], tile.head)
                         : nullptr;
      store_rows<In>(acc_o, scale, data, p.head_dim_v);
      if (kReleaseLate) release_q(at);
    }
    acc_o.clear();
  }

  // O takes the place of this consumer's rows of Q and leaves from there. The store's thread frees
  // them later (free_stored).
  __device__ __forceinline__ void store_by_map(const Tile& tile, unsigned at,
                                               const float (&scale)[kSlots]) {
    const uint32_t o_tile =
        smem_of(smem.q[stage_of<Shape::kQStages>(at)]) + consumer * kWarpgroupRows * 128;
    store_tile<In, Shape::kBlockM>(acc_o, o_tile, scale);
    async_proxy_fence();
    named_sync(kOwnBarrier + consumer, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int block = 0; block < VTile::kBlocks; ++block)
        tma_store(&maps.o, o_tile + block * QTile::kBlockBytes, block * kBlockDim,
                  tile.offset_q + rows_of(tile).begin, tile.head,
                  p.side_q.cu_seqlens ? 0 : tile.batch);
      tma_store_commit();
    }
    stored_stage = stage_of<Shape::kQStages>(at);
  }
  // All threads wait, which is nothing to those that stored nothing: no branch on the thread.
  __device__ __forceinline__ void free_stored() {
    if (!kReleaseLate || stored_stage < 0) return;
    tma_store_wait();
    release(smem.q_empty[stored_stage]);
    stored_stage = -1;
  }

  static constexpr float kLn2 = 0.6931471805599453f;
  static constexpr float kHuge = 1 << 20;  // whose roundings are 1/16

  const FwdParams& p;
  const FwdMaps& maps;
  const float& exp_scale;  // from the unit of scores to powers of two
  Storage& smem;
  const int consumer;

  // Where the stream is. Registers are short where three consumers share them, so what is needed
  // once a tile is read from shared memory again.
  unsigned tile_count = ~0u;
  unsigned step = 0;  // blocks whose S is done
  int n_block = 0;
  int first_block = 0;    // of the tile, the last one in order
  bool crossing = false;  // S is of the tile after P's
  unsigned clears = 0;    // bit i: in the i-th tile before this one, V has rows to be zeroed
  Range unmasked{};       // keys that every row of this consumer sees

  Accumulator<kBlockN> acc_s;
  Operand<kBlockN> probs;
  Accumulator<kDimV> acc_o;

  float reference[kSlots] = {-INFINITY, -INFINITY};
  float row_sum[kSlots] = {}, row_lost[kSlots] = {};  // this thread's share; see add_to_row
  float factor[kSlots] = {1.f, 1.f};                  // from the old reference to the new one
  bool moved = false;                                 // some row's reference, with this block
  bool huge = false;                                  // some row's reference is
  float done_max[kSlots], done_sum[kSlots];
  int stored_stage = -1;  // of Q, from which O is on its way
};

// ---- kernel ------------------------------------------------------------------------------------

template <typename Traits>
__device__ __forceinline__ void init_barriers(FwdStorage<Traits>& smem) {
  constexpr int kWarps =
      Traits::kConsumers * kWarpgroup / kWarpSize;  // one arrival a consumer warp
  const auto init = [](auto& full, auto& empty) {
    for (auto& barrier : full) mbarrier_init(smem_of(&barrier), 1);
    for (auto& barrier : empty) mbarrier_init(smem_of(&barrier), kWarps);
  };
  init(smem.q_full, smem.q_empty);
  init(smem.k_full, smem.k_empty);
  init(smem.v_full, smem.v_empty);
  mbarrier_init_fence();
}

// kSmemBytes stands in the kernel's name, where tools/kernel_report.py reads it.
template <typename Traits, int kSmemBytes>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdMaps maps,
               const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(1024) char storage[];
  FwdStorage<Traits>& smem = *reinterpret_cast<FwdStorage<Traits>*>(storage);
  // The same in all lanes, and known to be so by the compiler.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) FwdProducer<Traits>(p, maps, schedule, smem).run();
  } else {
    registers_take<Traits::kConsumerRegisters>();
    FwdConsumer<Traits>(p, maps, smem, warpgroup - 1).run();
  }
}

inline TmaTensor tma_tensor(const View& view, const SeqSide& side, int heads, int dim, int batch) {
  return {view.data,
          {dim, side.total, heads, side.cu_seqlens ? 1 : batch},
          {view.row_stride, view.head_stride, view.batch_stride}};
}

template <typename Traits>
FwdMaps fwd_maps(const FwdParams& p) {
  using Shape = typename Traits::Shape;
  constexpr CUtensorMapDataType kType = tma_type<typename Traits::In>();
  TmaTensor k = tma_tensor(p.k, p.side_k, p.num_heads_k, p.head_dim, p.batch);
  TmaTensor v = tma_tensor(p.v, p.side_k, p.num_heads_k, p.head_dim_v, p.batch);
  // Without keys there is only a sink. A map must describe something: one row of out, all of whose
  // scores are masked.
  if (p.side_k.total == 0) k = v = {p.out.data, {p.head_dim_v, 1, 1, 1}, {}};
  const TmaTensor q = tma_tensor(p.q, p.side_q, p.num_heads, p.head_dim, p.batch);
  const TmaTensor o = tma_tensor(p.out, p.side_q, p.num_heads, p.head_dim_v, p.batch);
  const bool stores_out = tma_fits(o);
  return {
      tma_map(q, kType, Shape::kBlockM),
      tma_map(k, kType, Shape::kBlockN),
      tma_map(v, kType, Shape::kBlockN),
      stores_out ? tma_map(o, kType, kWarpgroupRows) : CUtensorMap{},
      stores_out,
      Traits::kScore == ScoreKind::kPlain ? static_cast<float>(p.softmax_scale * kLog2e) : kLog2e};
}

template <typename Traits>
void launch_fwd(const FwdParams& p, const Launch& launch) {
  using Shape = typename Traits::Shape;
  constexpr int kSmemBytes = sizeof(FwdStorage<Traits>);
  static_assert(kSmemBytes <= 227 * 1024, "a block's shared memory");
  const auto kernel = &fwd_kernel<Traits, kSmemBytes>;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes),
        "the shared memory of a forward kernel");
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  const unsigned processors =
      static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount, device));
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
  const int m_blocks = ceil_div(p.side_q.longest(), Shape::kBlockM);
  const int64_t head_bytes =
      max_of<int64_t>(1, int64_t{2} * p.side_k.longest() * (p.head_dim + p.head_dim_v) / p.group());
  // Tiles that are all alike are dealt out; others are claimed one by one.
  const bool alike = p.window_left < 0 && p.window_right < 0 && !p.side_q.cu_seqlens &&
                     !p.side_q.seqused && !p.side_k.seqused;
  unsigned* claimed = alike ? nullptr : static_cast<unsigned*>(p.workspace);
  const cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  if (claimed)
    check(cudaMemsetAsync(claimed, 0, sizeof(unsigned), stream), "clearing a counter of tiles");
  const Schedule schedule = {
      static_cast<unsigned>(m_blocks),
      static_cast<unsigned>(clamp_to<int64_t>(kFwdBandBytes / head_bytes, 1, heads)),
      grid_size(heads * m_blocks), claimed};
  kernel<<<min_of(schedule.tiles, processors), Traits::kThreads, kSmemBytes, stream>>>(
      p, fwd_maps<Traits>(p), schedule);
  check(cudaGetLastError(), "a forward kernel");
}

// The kernel for the run-time features of a problem.
template <typename In, int kDim, int kDimV>
void fwd(const FwdParams& p, const Launch& launch) {
  using Config = FwdConfig<kDim, kDimV>;
  if (p.softcap != 0 || !(p.softmax_scale > 0))
    launch_fwd<FwdTraits<In, kDim, kDimV, typename Config::ModifiedShape, ScoreKind::kModified>>(
        p, launch);
  else if (p.side_k.longest() < kShort)  // not by the mask: one that hides nothing keeps the bits
    launch_fwd<FwdTraits<In, kDim, kDimV, typename Config::ShortShape, ScoreKind::kPlain>>(p,
                                                                                           launch);
  else
    launch_fwd<FwdTraits<In, kDim, kDimV, typename Config::Shape, ScoreKind::kPlain>>(p, launch);
}

inline size_t fwd_workspace(const FwdParams&) { return 16; }

}  // namespace flash::cuda::sm90
