// Forward of the Hopper class: FlashAttention-3's schedule on wgmma, with TMA copies, persistent
// blocks, and tiles that follow each other without a gap.
//
// A block is one producer warp and kConsumers warpgroups of 64 query rows each. It walks a list of
// tiles (64 kConsumers query rows of one head), and each tile's blocks of kBlockN keys. For a
// consumer this is one stream of key blocks: while it computes the softmax of one block, the tensor
// cores run the product with V of the block before, also where the two belong to different tiles.
//
// Who waits for whom (docs/hopper.md has the figure):
//   producer   for empty stages of Q, K, V, which consumers' warps free when their products are done
//   consumer   for full stages; for its turn at the tensor cores, which the previous consumer passes
//              on when its products are issued, so that one's softmax lies under the others' products
#pragma once

#include "../../common/score.h"
#include "../../common/softmax.h"
#include "../../params.h"

#include "../launch.h"
#include "../primitives/mbarrier.h"
#include "../primitives/tma.h"

#include "config.h"
#include "fragment.h"
#include "work.h"

namespace flash::cuda::sm90 {

// Plain: the scaled product. Modified: softcap, or a scale that is not positive.
enum class ScoreKind { kPlain, kModified };

template <typename In_, int kDim_, int kDimV_, typename Shape_, ScoreKind kScore_>
struct FwdTraits {
  using In = In_;
  using Shape = Shape_;
  static constexpr int kDim = kDim_;    // of q and k, padded
  static constexpr int kDimV = kDimV_;  // of v and out
  static constexpr ScoreKind kScore = kScore_;
  static constexpr int kConsumers = Shape::kConsumers;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // 65536 registers in all; 168 (or 128) a thread at the start, in multiples of 8.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  using QTile = SmemTile<Shape::kBlockM, kDim>;
  using KTile = SmemTile<Shape::kBlockN, kDim>;
  using VTile = SmemTile<Shape::kBlockN, kDimV>;
};

// A slot of a ring of stages, and how often the ring has come round (its parity).
template <int kStages>
struct RingSlot {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <typename Traits>
struct FwdStorage {
  using Shape = typename Traits::Shape;
  // A consumer reads a tile's entry until it has stored the tile; the producer is ahead by the
  // stages of Q, and one tile of a single key block may still wait for its store.
  static constexpr int kTiles = Shape::kQStages + 2;
  alignas(1024) char q[Shape::kQStages][Traits::QTile::kBytes];
  alignas(1024) char k[Shape::kStages][Traits::KTile::kBytes];
  alignas(1024) char v[Shape::kStages][Traits::VTile::kBytes];
  Tile tile[kTiles];
  uint64_t q_full[Shape::kQStages], q_empty[Shape::kQStages];
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages];
  uint64_t v_full[Shape::kStages], v_empty[Shape::kStages];
};

struct FwdMaps {
  CUtensorMap q, k, v;
};

__device__ __forceinline__ uint32_t smem_of(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- producer --------------------------------------------------------------------------------------

// One thread. Loads go out in the order of use: Q, K0, K1, V0, K2, V1, ..., where K1 may be the first
// of the next tile.
template <typename Traits>
class FwdProducer {
  using Shape = typename Traits::Shape;
  using Storage = FwdStorage<Traits>;

 public:
  __device__ __forceinline__ FwdProducer(const FwdParams& params, const FwdMaps& tensor_maps,
                                         const Schedule& schedule, Storage& storage)
      : p(params), maps(tensor_maps), schedule_(schedule), smem(storage) {}

  __device__ __forceinline__ void run() {
    Tile tile = next_tile();
    if (tile.head < 0) return publish(tile);
    load_q(tile);
    load_k(tile, tile.last_block);
    for (;;) {
      for (int n = tile.last_block; n > tile.first_block; --n) {
        load_k(tile, n - 1);
        load_v(tile, n);
      }
      const Tile next = next_tile();
      if (Shape::kQStages == 1 || next.head < 0) load_v(tile, tile.first_block);
      if (next.head < 0) return publish(next);
      load_q(next);
      load_k(next, next.last_block);
      if (Shape::kQStages > 1) load_v(tile, tile.first_block);
      tile = next;
    }
  }

 private:
  // Past the rows of short sequences, whose tiles hold nothing.
  __device__ __forceinline__ Tile next_tile() {
    for (;;) {
      const Tile tile =
          schedule_.template tile<Shape::kBlockM, Shape::kBlockN>(p, schedule_.nth(turn++));
      if (tile.head < 0 || tile.first_row < tile.seqlen_q) return tile;
    }
  }

  // The end of the list takes the place of a Q.
  __device__ __forceinline__ void publish(const Tile& tile) {
    mbarrier_wait(smem_of(&smem.q_empty[q.slot]), q.parity ^ 1);
    smem.tile[entry.slot] = tile;
    mbarrier_arrive(smem_of(&smem.q_full[q.slot]));
  }

  __device__ __forceinline__ void load_q(const Tile& tile) {
    const uint32_t full = smem_of(&smem.q_full[q.slot]);
    mbarrier_wait(smem_of(&smem.q_empty[q.slot]), q.parity ^ 1);
    smem.tile[entry.slot] = tile;
    mbarrier_arrive_expect(full, Traits::QTile::kBytes);
    load<typename Traits::QTile>(smem.q[q.slot], &maps.q, full, tile.offset_q + tile.first_row,
                                 tile.head, tile.batch, p.side_q);
    q.advance();
    entry.advance();
  }
  __device__ __forceinline__ void load_k(const Tile& tile, int n_block) {
    const uint32_t full = smem_of(&smem.k_full[k.slot]);
    mbarrier_wait(smem_of(&smem.k_empty[k.slot]), k.parity ^ 1);
    mbarrier_arrive_expect(full, Traits::KTile::kBytes);
    load<typename Traits::KTile>(smem.k[k.slot], &maps.k, full,
                                 tile.offset_k + n_block * Shape::kBlockN, tile.head_k,
                                 tile.batch, p.side_k);
    k.advance();
  }
  __device__ __forceinline__ void load_v(const Tile& tile, int n_block) {
    const uint32_t full = smem_of(&smem.v_full[v.slot]);
    mbarrier_wait(smem_of(&smem.v_empty[v.slot]), v.parity ^ 1);
    mbarrier_arrive_expect(full, Traits::VTile::kBytes);
    load<typename Traits::VTile>(smem.v[v.slot], &maps.v, full,
                                 tile.offset_k + n_block * Shape::kBlockN, tile.head_k,
                                 tile.batch, p.side_k);
    v.advance();
  }

  template <typename Target>
  __device__ __forceinline__ void load(char* target, const CUtensorMap* map, uint32_t full,
                                       int64_t row, int head, int batch, const SeqSide& side) {
#pragma unroll
    for (int block = 0; block < Target::kBlocks; ++block)
      tma_load(smem_of(target) + block * Target::kBlockBytes, map, full, block * kBlockDim,
               static_cast<int>(row), head, side.cu_seqlens ? 0 : batch);
  }

  const FwdParams& p;
  const FwdMaps& maps;
  const Schedule& schedule_;
  Storage& smem;
  unsigned turn = 0;
  RingSlot<Shape::kQStages> q;
  RingSlot<Shape::kStages> k, v;
  RingSlot<Storage::kTiles> entry;
};

// ---- consumer --------------------------------------------------------------------------------------

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
  static constexpr bool kTurns = Shape::kPingPong == PingPong::kOn;

 public:
  __device__ __forceinline__ FwdConsumer(const FwdParams& params, Storage& storage, int consumer_)
      : p(params), smem(storage), consumer(consumer_) {}

  // The schedule. S is of the block that the cursor is at, O and P of the one before it.
  __device__ __forceinline__ void run() {
    start();
    if (!advance()) return;
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
      gemm_pv();
      pass_turn();
      wgmma_wait<1>();
      pin(acc_s.x);
      release_k();
      if (crossing) open_rows();
      score_and_mask();
      online_softmax();
      wgmma_wait<0>();
      pin(acc_o.x);
      pin(acc_s.x);
      release_v();
      if (crossing)
        finish();
      else
        rescale();
      to_operand<In>(probs, acc_s);  // now: the product just waited for has read the old ones
    }
    gemm_pv();
    close_rows();
    wgmma_wait<0>();
    pin(acc_o.x);
    finish();
    end_turns();
  }

 private:
  // ---- turns at the tensor cores -------------------------------------------------------------------

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

  // ---- the stream of key blocks --------------------------------------------------------------------

  __device__ __forceinline__ void start() {
    if (consumer == Traits::kConsumers - 1) pass_turn();
    exp_scale = kPlain ? static_cast<float>(p.softmax_scale) * kLog2e : kLog2e;
  }

  // To the next block of keys; false at the end of the list.
  __device__ __forceinline__ bool advance() {
    keep_of_pv = keep_of_qk;
    crossing = n_block == first_block;
    if (crossing) {
      entry_of_pv = entry;
      entry = entry == Storage::kTiles - 1 ? 0 : entry + 1;
      mbarrier_wait(smem_of(&smem.q_full[q.slot]), q.parity);
      const Tile& tile = smem.tile[entry];
      if (tile.head < 0) return false;
      n_block = tile.last_block;
      first_block = tile.first_block;
      const Mask mask = mask_of(tile);
      const Range rows = rows_of(tile);
      unmasked = {mask.first_key(rows.end - 1), mask.end_key(rows.begin)};
      keep = {tile.keep_begin, tile.keep_end};
    } else {
      --n_block;
    }
    const int key = n_block * kBlockN;
    keep_of_qk = {max_of(keep.begin - key, 0), min_of(keep.end - key, kBlockN)};
    return true;
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
    release(smem.k_empty[k.slot]);
    k.advance();
    if (n_block == first_block) {  // the tile's last product with Q
      release(smem.q_empty[q.slot]);
      q.advance();
    }
  }
  __device__ __forceinline__ void release_v() {
    release(smem.v_empty[v.slot]);
    v.advance();
  }

  // ---- products ------------------------------------------------------------------------------------

  __device__ __forceinline__ void gemm_qk() {
    mbarrier_wait(smem_of(&smem.k_full[k.slot]), k.parity);
    const uint32_t q_tile = smem_of(smem.q[q.slot]), k_tile = smem_of(smem.k[k.slot]);
    pin(acc_s.x);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      Wgmma<In, kBlockN>::template ss<Major::kK, Major::kK>(
          acc_s.x, QTile::along_dim(q_tile, consumer * kWarpgroupRows, step),
          KTile::along_dim(k_tile, 0, step), step > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void gemm_pv() {
    mbarrier_wait(smem_of(&smem.v_full[v.slot]), v.parity);
    if (keep_of_pv.begin > 0 || keep_of_pv.end < kBlockN) clear_v();
    const uint32_t v_tile = smem_of(smem.v[v.slot]);
    pin(acc_o.x);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      Wgmma<In, kDimV>::template rs<Major::kMN>(acc_o.x, probs.r[step],
                                                VTile::along_rows(v_tile, step),
                                                step > 0 || accumulate);
    wgmma_commit();
    accumulate = true;
  }

  // Every consumer does it for itself: they write the same zeros, and none waits for another.
  __device__ __forceinline__ void clear_v() {
    clear_rows_outside<kBlockN, kDimV>(smem.v[v.slot], keep_of_pv.begin, keep_of_pv.end);
    async_proxy_fence();
    named_sync(kOwnBarrier + consumer, kWarpgroup);
  }

  // ---- scores --------------------------------------------------------------------------------------

  __device__ __forceinline__ void score_and_mask() {
    if (!kPlain) {
      const float scale = static_cast<float>(p.softmax_scale);
      const float cap = static_cast<float>(p.softcap);
      const Chain<float, Softcap<float>> chain = {{cap, cap > 0 ? 1 / cap : 0}, {}};
      chain.for_each_active(scale, [&](auto modify) {
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

  template <typename Limit, typename Sees>
  __device__ __forceinline__ void mask_scores(Limit limit_of, Sees sees) {
    const Tile& tile = smem.tile[entry];
    const Mask mask = mask_of(tile);
    int limit[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      limit[slot] = limit_of(mask, rows_of(tile).begin + row_of(slot)) - n_block * kBlockN;
    acc_s.for_each([&](float& s, int slot, int col) { s = sees(col, limit[slot]) ? s : -INFINITY; });
  }

  // s becomes p = exp(s - reference) in powers of two. A row's reference is a maximum that it had,
  // kept until it has been exceeded by a factor of 2^kLazy: any reference gives the same result, and
  // the product of O with its correction is skipped where no row of the warp moved.
  __device__ __forceinline__ void online_softmax() {
    float m[kSlots];
#ifdef EXP_NOMAX
    moved = reference[0] == -INFINITY || n_block == first_block;
    moved = warp_any(moved);
    if (moved) {
      row_maxima(acc_s, m);
    }
#else
    row_maxima(acc_s, m);
    bool any = false;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) any |= exceeds(m[slot], slot);
    moved = warp_any(any);
#endif
    if (moved) move_reference(m);
    if (huge) settle_huge();
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

  // True also while nothing has been seen: infinity, or NaN where this block has nothing either.
  __device__ __forceinline__ bool exceeds(float m, int slot) const {
    return !((m - reference[slot]) * exp_scale <= kLazy);
  }

  // shift is the reference rounded in powers of two: corrections are made of it, so that its
  // rounding is nobody's error. Where it is huge that rounding alone is more than any exponential:
  // there, scores are subtracted first (settle_huge) and shift is 0.
  __device__ __forceinline__ void move_reference(const float (&m)[kSlots]) {
    bool any_huge = false;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const bool moves = exceeds(m[slot], slot);
      const float from = reference[slot], to = moves ? m[slot] : from;
      const bool from_huge = is_huge(from), to_huge = is_huge(to);
      const float new_shift = to == -INFINITY || to_huge ? 0.f : to * exp_scale;
      const float distance = from_huge || to_huge ? (from - to) * exp_scale : shift[slot] - new_shift;
      factor[slot] = !moves ? 1.f : from == -INFINITY ? 0.f : exp2_approx(distance);
      reference[slot] = to;
      shift[slot] = new_shift;
      row_sum[slot] *= factor[slot];
      row_lost[slot] *= factor[slot];
      any_huge |= to_huge;
    }
    huge = warp_any(any_huge);
  }

  __device__ __forceinline__ bool is_huge(float m) const {
    return fabsf(m * exp_scale) > kHuge && m != -INFINITY;
  }

  __device__ __forceinline__ void settle_huge() {
    acc_s.for_each([&](float& s, int slot, int) {
      if (is_huge(reference[slot])) s -= reference[slot];
    });
  }

  // Kahan's sum, once a block: over millions of keys of like weight the roundings of a plain float
  // sum all go the same way (4M keys: 1 % of the sum).
  __device__ __forceinline__ void add_to_row(int slot, float x) {
    const float y = x - row_lost[slot];
    const float sum = row_sum[slot] + y;
    row_lost[slot] = (sum - row_sum[slot]) - y;
    row_sum[slot] = sum;
  }

  __device__ __forceinline__ void rescale() {
    if (!moved) return;
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) acc_o.x[i] *= factor[i / 2 % 2];
  }

  // ---- rows ----------------------------------------------------------------------------------------

  // Statistics of a finished tile are kept until its last product is done.
  __device__ __forceinline__ void close_rows() {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      done_max[slot] = is_huge(reference[slot]) || reference[slot] == -INFINITY
                           ? reference[slot] * (kPlain ? static_cast<float>(p.softmax_scale) : 1.f)
                           : shift[slot] * kLn2;
      done_sum[slot] = row_sum[slot];
    }
  }
  __device__ __forceinline__ void open_rows() {
    close_rows();
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      reference[slot] = -INFINITY;
      shift[slot] = row_sum[slot] = row_lost[slot] = 0.f;
    }
    huge = false;
  }

  __device__ __forceinline__ void finish() {
    const Tile& tile = smem.tile[entry_of_pv];
    const SeqInfo seq = {tile.offset_q, tile.offset_k, tile.seqlen_q, tile.seqlen_k};
    const float sink = p.sinks.of(tile.batch, tile.head, -INFINITY);
    float* lse = static_cast<float*>(p.lse);
    float scale[kSlots];
    char* rows[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float sum = reduce_row(done_sum[slot], [](float a, float b) { return a + b; });
      const RowEnd<float> end = finish_row(done_max[slot], sum, sink);
      const int i = rows_of(tile).begin + row_of(slot);
      const bool exists = i < tile.seqlen_q;
      if (exists && owns_row()) lse[p.row_index(tile.batch, tile.head, seq, i)] = end.lse;
      scale[slot] = end.out_scale;
      rows[slot] = exists ? static_cast<char*>(p.out.data) +
                                2 * p.out.at(tile.batch, tile.offset_q + i, tile.head)
                          : nullptr;
    }
    store_rows<In>(acc_o, scale, rows, p.head_dim_v);
    accumulate = false;
  }

  static constexpr float kLog2e = 1.4426950408889634f;
  static constexpr float kLn2 = 0.6931471805599453f;
  static constexpr float kLazy = 8.f;        // powers of two; P stays far below fp16's largest
  static constexpr float kHuge = 1 << 20;    // whose roundings are 1/16

  const FwdParams& p;
  Storage& smem;
  const int consumer;

  // Where the stream is.
  int n_block = 0, first_block = 0;
  bool crossing = true;          // S is of another tile than O
  Range unmasked{}, keep{};      // keys of the tile: those that every row sees; those with clean V
  Range keep_of_qk{}, keep_of_pv{};  // of the block of S and of that of P, inside the block
  RingSlot<Shape::kQStages> q;
  RingSlot<Shape::kStages> k, v;
  int entry = -1, entry_of_pv = -1;  // of smem.tile

  Accumulator<kBlockN> acc_s;
  Operand<kBlockN> probs;
  Accumulator<kDimV> acc_o;
  bool accumulate = false;  // O holds something of this tile

  float exp_scale;  // from the unit of scores to powers of two
  float reference[kSlots] = {-INFINITY, -INFINITY}, shift[kSlots] = {};
  float row_sum[kSlots] = {}, row_lost[kSlots] = {};  // this thread's share; see add_to_row
  float factor[kSlots] = {1.f, 1.f};                  // from the old reference to the new one
  bool moved = false, huge = false;
  float done_max[kSlots], done_sum[kSlots];
};

// ---- kernel ----------------------------------------------------------------------------------------

template <typename Traits>
__device__ __forceinline__ void init_barriers(FwdStorage<Traits>& smem) {
  constexpr int kWarps = Traits::kConsumers * kWarpgroup / kWarpSize;  // one arrival a consumer warp
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
    FwdConsumer<Traits>(p, smem, warpgroup - 1).run();
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
  return {tma_map(tma_tensor(p.q, p.side_q, p.num_heads, p.head_dim, p.batch), kType,
                  Shape::kBlockM),
          tma_map(k, kType, Shape::kBlockN), tma_map(v, kType, Shape::kBlockN)};
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
  const Schedule schedule = {
      static_cast<unsigned>(m_blocks),
      static_cast<unsigned>(clamp_to<int64_t>(kFwdBandBytes / head_bytes, 1, heads)),
      grid_size(heads * m_blocks)};
  kernel<<<min_of(schedule.tiles, processors), Traits::kThreads, kSmemBytes,
           static_cast<cudaStream_t>(launch.stream)>>>(p, fwd_maps<Traits>(p), schedule);
  check(cudaGetLastError(), "a forward kernel");
}

// The kernel for the run-time features of a problem.
template <typename In, int kDim, int kDimV>
void fwd(const FwdParams& p, const Launch& launch) {
  using Config = FwdConfig<kDim, kDimV>;
  if (p.softcap == 0 && p.softmax_scale > 0)
    launch_fwd<FwdTraits<In, kDim, kDimV, typename Config::Shape, ScoreKind::kPlain>>(p, launch);
  else
    launch_fwd<FwdTraits<In, kDim, kDimV, typename Config::ModifiedShape, ScoreKind::kModified>>(
        p, launch);
}

inline size_t fwd_workspace(const FwdParams&) { return 0; }

}  // namespace flash::cuda::sm90
