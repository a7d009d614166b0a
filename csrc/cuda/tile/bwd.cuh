// Backward of the tile class: recomputation from lse (FlashAttention, algorithm 4;
// FlashAttention-2, section 3.2), parallel over key blocks x key heads x sequences.
//
// A block owns kBlockN keys of one (sequence, key head), keeps their K and V in shared memory and
// their dK and dV in registers, and walks over the query rows that see them, a group's query heads
// one after the other. Five products a step, tiles transposed (rows are keys):
//   S^T = K Q^T, dP^T = V dO^T         a warp makes the scores of its keys
//   dV += P^T dO, dK += dS^T Q         P and dS from registers, or, where a group of warps shares
//                                      the columns of dK and dV, through shared memory once
//   dQ = dS K                          dS through shared memory; added to one float accumulator
//
// Who waits: a barrier a step stands between dS (and P) and the products that read what other warps
// wrote. With three stages of Q and dO and two of dS and P it is the only one: it also says that
// the next step's copies have landed and that everybody has left the step before, whose places are
// then filled; warps may be half a step apart. With fewer stages a second barrier, at the top of a
// step, says that its copies have landed and that everybody has left dS.
//
// Deterministic: blocks start with the last keys and walk their rows forwards, so that a block of a
// causal mask starts at its diagonal, and a tile of dQ is added to in the order of the launch: the
// key blocks of its later keys first. One thread waits for the block's turn before the step's
// barrier and passes the last step's turn on behind it. Nobody waits for a block that is launched
// later. Without that order blocks walk backwards from the last rows, the longest ones first.
#pragma once

#include "../../bias_grad.h"
#include "../primitives/semaphore.h"
#include "band_grid.h"
#include "bwd_bias.cuh"
#include "bwd_finish.cuh"
#include "bwd_norm.cuh"
#include "bwd_tile.cuh"
#include "kinds.h"

namespace flash::cuda {

template <typename In_, int kDim_, int kSmemKB, ScoreKind kScore, DropoutKind kDropout_>
struct BwdTraits {
  using In = In_;
  using Config = BwdConfig<kDim_, kSmemKB>;
  static constexpr bool kPlain = kScore == ScoreKind::kPlain;
  static constexpr bool kDropout = kDropout_ == DropoutKind::kOn;
  using Shape = std::conditional_t<kPlain, typename Config::Shape, typename Config::ModifiedShape>;
  static constexpr int kDim = kDim_;
  static constexpr int kThreads = Shape::kWarps * kWarpSize;
};

// (kBlockN, kBlockM): dS^T, and P^T where warps share the columns of dV.
template <int kBytes, bool kWithP>
struct ScoreStage {
  char ds[kBytes];
  char p[kBytes];
};
template <int kBytes>
struct ScoreStage<kBytes, false> {
  char ds[kBytes];
};

// Not a byte more than is needed: at head_dim 64 two blocks fill a multiprocessor to the last one.
template <typename Traits>
struct BwdStorage {
  using Shape = typename Traits::Shape;
  static constexpr int kScoreBytes = Shape::kBlockN * Shape::kBlockM * 2;
  struct Stage {
    char q[Shape::kBlockM * Traits::kDim * 2];
    char dout[Shape::kBlockM * Traits::kDim * 2];
  };
  struct Rows {
    float shift[Shape::kBlockM];
    float delta[Shape::kBlockM];
  };
  char k[Shape::kBlockN * Traits::kDim * 2];  // later the block's dK
  char v[Shape::kBlockN * Traits::kDim * 2];  // later the block's dV
  ScoreStage<kScoreBytes, (Shape::kDimParts > 1)> scores[Shape::kScoreStages];
  Stage stage[Shape::kStages];
  Rows rows[2];  // read before the step's barrier only, so that two are always enough
};

// Copies of blocks of query rows, of any query head of a group. One pointer a thread is all that it
// keeps over the steps: the accumulators leave no registers for more.
template <int kDim, int kRows, int kThreads>
class StepCopy {
  static constexpr int kChunks = SmemTile<kDim>::kChunks;
  static constexpr int kSlots = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // 96, 192: some idle
  static constexpr int kRowStep = kThreads / kSlots;
  static_assert(kRows % kRowStep == 0, "every thread copies the same number of rows");

 public:
  __device__ __forceinline__ StepCopy(const View& view, int batch, int64_t offset, int head,
                                      int dim)
      : source_(static_cast<const char*>(view.data) + 2 * view.at(batch, offset + row(), head) +
                (8 * chunk() < dim ? 16 * chunk() : 0)) {}

  // Rows [first, first + kRows) of the group's head into `tile`; rows outside `visible` are
  // zero-filled and never read: 0 x NaN must not come into being.
  __device__ __forceinline__ void issue(const View& view, int dim, char* tile, int group_head,
                                        int first, Range visible) const {
    if (kChunks < kSlots && chunk() >= kChunks) return;
    const int bytes = clamp_to(2 * dim - 16 * chunk(), 0, 16);  // of this chunk that exist
    const bool all = first >= visible.begin && first + kRows <= visible.end;
    const uint32_t target = smem_address(tile);
    const char* source = source_ + 2 * (group_head * view.head_stride + first * view.row_stride);
#pragma unroll
    for (int r = 0; r < kRows; r += kRowStep) {
      const int at = first + row() + r;
      const bool seen = all || (at >= visible.begin && at < visible.end);
      cp_async_16(target + SmemTile<kDim>::offset(row() + r, chunk()), source, seen ? bytes : 0);
      source += 2 * kRowStep * view.row_stride;
    }
  }

 private:
  static __device__ __forceinline__ int row() { return threadIdx.x / kSlots; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kSlots; }

  const char* source_;
};

template <typename Traits>
class BwdBlock {
  using In = typename Traits::In;
  using Shape = typename Traits::Shape;
  using Storage = BwdStorage<Traits>;
  using Stage = typename Storage::Stage;
  using Rows = typename Storage::Rows;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kBlockM = Shape::kBlockM;
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kSubM = Shape::kSubM;
  static constexpr int kWarpKeys = Shape::kWarpKeys;
  static constexpr int kDimParts = Shape::kDimParts;
  static constexpr int kSteps = kDim / 16;  // k16 steps of a score product
  static constexpr bool kShares = kDimParts > 1;
  static constexpr bool kOneBarrier = Shape::kStages == 3;
  static constexpr int kAhead = kOneBarrier ? 2 : 1;  // steps whose copies are under way
  // Unrolled, modified scores of several sub-tiles would be in registers at once.
  static constexpr int kSubUnroll = Traits::kPlain && !Traits::kDropout ? kBlockM / kSubM : 1;
  static constexpr int kDqRows = kBlockM / Shape::kDqRowParts;
  static constexpr int kDqCols = kDim / Shape::kDqColParts;
  using AccS = Accumulator<kWarpKeys, kSubM>;
  using AccK = Accumulator<kWarpKeys, kDim / kDimParts>;
  static constexpr int kDqChunks = Shape::kDqChunks;
  using AccQ = Accumulator<kDqRows, kDqCols / kDqChunks>;
  using CopyM = StepCopy<kDim, kBlockM, Traits::kThreads>;
  using CopyN = TileCopy<kDim, kBlockN, Traits::kThreads>;

 public:
  __device__ __forceinline__ BwdBlock(const BwdParams& params, const BwdWorkspace& workspace,
                                      Storage& storage, int n_block_, int head_k_, int batch)
      : p(params),
        w(workspace),
        smem(storage),
        n_block(n_block_),
        head_k(head_k_),
        head(params, batch, head_k_ * params.group()),
        rows(head.mask.rows_of(keys())),
        first_block(static_cast<int>(
            w.block(p, batch, head_k_ * params.group(), p.side_q.offset(batch), 0))),
        copy_q(p.q, batch, p.side_q.offset(batch), head_k_ * params.group(), p.head_dim),
        copy_dout(p.dout, batch, p.side_q.offset(batch), head_k_ * params.group(), p.head_dim_v) {}

  // The schedule of a block.
  __device__ __forceinline__ void run() {
    if (keys().begin >= head.mask.seqlen_k) return;
    start();
    for (int group_head = 0; group_head < p.group(); ++group_head) {
      head.set_head(p, head_k * p.group() + group_head);
      for (int at = 0; at < blocks().size(); ++at) {
        if (!kOneBarrier) {
          copy_wait<0>();
          __syncthreads();  // this step has landed; everybody has left dS and the other stage
          if (Shape::kStages == 2) load(group_head, at + 1, step_number + 1);
        }
        const Range block_rows = rows_of(m_block(at));
        if (head.mask.is_edge(Traits::kPlain ? intersect(block_rows, sequence()) : block_rows,
                              keys()))
          step<true>(group_head, at);
        else
          step<false>(group_head, at);
        if (Shape::kStages == 1) {
          __syncthreads();  // everybody has left the only stage
          load(group_head, at + 1, step_number + 1);
        }
        ++step_number;
      }
      if (p.dalibi_slopes) store_dslope();
    }
    finish();
  }

 private:
  __device__ __forceinline__ void start() {
    const int batch = head.batch;
    const int64_t offset_k = p.side_k.offset(batch);
    const Range seen = head.mask.keys_of(sequence());
    acc_dk.clear();
    acc_dv.clear();
    if (rows.empty()) return;
    CopyN(p.k, batch, offset_k, head_k, p.head_dim).issue(smem.k, keys().begin, seen);
    CopyN(p.v, batch, offset_k, head_k, p.head_dim_v).issue(smem.v, keys().begin, seen);
    load(0, 0, 0);
    if (kOneBarrier) {
      load(0, 1, 1);
      copy_wait<1>();
      __syncthreads();  // the first step has landed
    }
  }

  // The query block of a head's step `at`.
  __device__ __forceinline__ int m_block(int at) const {
    return p.deterministic ? blocks().begin + at : blocks().end - 1 - at;
  }

  // The copies of step `number`, if there is one, into a stage that is free. Steps past a head's
  // last one are the first ones of the group's next head.
  __device__ __forceinline__ void load(int group_head, int at, int number) {
    for (int ahead = 0; ahead < kAhead && at >= blocks().size(); ++ahead) {
      at -= blocks().size();
      ++group_head;
    }
    if (group_head < p.group()) {
      const int block = block_of(group_head, m_block(at)), first_row = m_block(at) * kBlockM;
      Stage& stage = smem.stage[number % Shape::kStages];
      Rows& values = smem.rows[number % 2];
      copy_q.issue(p.q, p.head_dim, stage.q, group_head, first_row, rows);
      copy_dout.issue(p.dout, p.head_dim_v, stage.dout, group_head, first_row, rows);
      const int64_t first = static_cast<int64_t>(block) * kBlockM;
      copy_row_values<kBlockM>(values.shift, w.shift + first, threadIdx.x);
      copy_row_values<kBlockM>(values.delta, w.delta + first, threadIdx.x - kBlockM / 4);
    }
    copy_commit();
  }

  // One tile: the same code for edges and the inside.
  template <bool kEdge>
  __device__ __forceinline__ void step(int group_head, int at) {
    const Stage& stage = smem.stage[step_number % Shape::kStages];
    auto& shared = smem.scores[step_number % Shape::kScoreStages];
    const int block = block_of(group_head, m_block(at));
    if constexpr (kShares) {
      AccS prob, dscore;
      scores<kEdge>(prob, dscore, stage, block, m_block(at), dim_part());
      store_columns<In, kBlockM>(prob, shared.p, first_row(), dim_part() * kSubM);
      store_columns<In, kBlockM>(dscore, shared.ds, first_row(), dim_part() * kSubM);
    } else {
#pragma unroll(kSubUnroll)
      for (int sub = 0; sub < kBlockM / kSubM; ++sub) {
        AccS prob, dscore;
        scores<kEdge>(prob, dscore, stage, block, m_block(at), sub);
        store_columns<In, kBlockM>(dscore, shared.ds, first_row(), sub * kSubM);
        gemm_from_registers(acc_dv, prob, stage.dout, sub);
        gemm_from_registers(acc_dk, dscore, stage.q, sub);
      }
    }
    if (kOneBarrier) copy_wait<0>();
    if (in_order()) wait_for_turn(w.turns + block, turn_of(m_block(at)));
    __syncthreads();  // dS, and P, are whole; it is this block's turn to add dQ
    if (in_order()) pass_last_turn(block);
    if (kOneBarrier) load(group_head, at + 2, step_number + 2);
    if constexpr (kShares) {
      gemm_from_shared(acc_dv, shared.p, stage.dout);
      gemm_from_shared(acc_dk, shared.ds, stage.q);
    }
    if (p.dq.data) add_dq(block, shared.ds);
  }

  // P^T and dS^T of this warp's keys and rows [kSubM sub, kSubM (sub + 1)) of the step.
  template <bool kEdge>
  __device__ __forceinline__ void scores(AccS& prob, AccS& dscore, const Stage& stage, int block,
                                         int row_block, int sub) {
    prob.clear();
    dscore.clear();
    gemm_scores(prob, dscore, stage, sub);
    const int row = row_block * kBlockM + sub * kSubM;
    const Rows& of_step = smem.rows[step_number % 2];
    const int64_t first = static_cast<int64_t>(block) * kBlockM + sub * kSubM;
    const RowValues values = {of_step.shift + sub * kSubM, of_step.delta + sub * kSubM,
                              w.large_anchor + first, w.large_shift + first};
    const int key = keys().begin + first_row();
    const bool stores_dbias = p.dbias.data && !dbias_is_broadcast(p);
    tile_grads<kEdge, Traits::kDropout>(
        prob, dscore, head, values, row, key, p.dalibi_slopes || stores_dbias,
        [&](const typename AccS::Place& at, float ds) {
          const int i = row + at.col, j = key + AccS::row(at.slot);
          if (p.dalibi_slopes)
            dslope -= ds * Alibi<float>{0.f, head.mask.diagonal()}.distance(i, j);
          if (stores_dbias && i < head.mask.seqlen_q && j < head.mask.seqlen_k)
            store_bias_grad(p.dbias, head.batch, head.head, i, j, ds);
        });
  }

  // S^T += K Q^T and dP^T += V dO^T, step by step together: H200, head_dim 128, full, 4k: 282 ->
  // 296 TFLOP/s against one after the other.
  __device__ __forceinline__ void gemm_scores(AccS& s, AccS& dp, const Stage& stage, int sub) {
    const uint32_t first = sub * kSubM * SmemTile<kDim>::kRowBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      OperandA<kWarpKeys> a, c;
      load_a<kDim, kWarpKeys>(a, smem_address(smem.k), first_row(), k);
      load_a<kDim, kWarpKeys>(c, smem_address(smem.v), first_row(), k);
      mma_abt_pair<In, kDim>(s, a, smem_address(stage.q) + first, dp, c,
                             smem_address(stage.dout) + first, k);
    }
  }

  __device__ __forceinline__ void gemm_from_registers(AccK& acc, const AccS& a,
                                                      const char* row_tile, int sub) {
    const uint32_t b = smem_address(row_tile) + sub * kSubM * SmemTile<kDim>::kRowBytes;
#pragma unroll
    for (int k = 0; k < kSubM / 16; ++k)
      mma_ab<In, kDim, kDimParts>(acc, as_operand<In>(a, k), b, k, 0);
  }

  __device__ __forceinline__ void gemm_from_shared(AccK& acc, const char* score_tile,
                                                   const char* row_tile) {
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      OperandA<kWarpKeys> a;
      load_a<kBlockM, kWarpKeys>(a, smem_address(score_tile), first_row(), k);
      mma_ab<In, kDim, kDimParts>(acc, a, smem_address(row_tile), k, dim_part());
    }
  }

  // This warp's part of dQ = dS K, added to the accumulator in chunks of columns: the additions of
  // one go out under the products of the next.
  __device__ __forceinline__ void add_dq(int block, const char* ds_tile) {
    const int row_part = warp_id() / Shape::kDqColParts, col_part = warp_id() % Shape::kDqColParts;
    float* target =
        w.dq + static_cast<int64_t>(block) * w.tile_floats + warp_id() * (kDqRows * kDqCols);
#pragma unroll
    for (int chunk = 0; chunk < kDqChunks; ++chunk) {
      AccQ acc_dq;
      acc_dq.clear();
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {
        OperandA<kDqRows> a;
        load_a_transposed<kBlockM, kDqRows>(a, smem_address(ds_tile), row_part * kDqRows, k);
        mma_ab<In, kDim, Shape::kDqColParts, kDqChunks>(acc_dq, a, smem_address(smem.k), k,
                                                        col_part, chunk);
      }
      add_to_global(acc_dq, target + chunk * (kDqRows * kDqCols / kDqChunks));
    }
  }

  // ---- turns, one thread's work ----

  __device__ __forceinline__ bool in_order() const {
    return p.deterministic && p.dq.data && threadIdx.x == 0;
  }
  // The key blocks that add to this tile of dQ before this block.
  __device__ __forceinline__ int turn_of(int row_block) const {
    return (head.mask.keys_of(rows_of(row_block)).end - 1) / kBlockN - n_block;
  }
  // Behind a barrier: everybody's additions of the step before are under way, and what follows the
  // turn in another block comes after them.
  __device__ __forceinline__ void pass_last_turn(int next_block) {
    if (last_block >= 0) pass_turn(w.turns + last_block);
    last_block = next_block;
  }

  // ---- the end ----

  // This (key block, query head)'s share of dalibi_slopes.
  __device__ __forceinline__ void store_dslope() {
    const float sum = sum_lanes<kWarpSize>(dslope);
    // dS of the step that has just ended, which the next step does not touch.
    float* shares =
        reinterpret_cast<float*>(smem.scores[(step_number + 1) % Shape::kScoreStages].ds);
    __syncthreads();  // everybody has left it
    if (lane_id() == 0) shares[warp_id()] = sum;
    dslope = 0.f;
    __syncthreads();  // all shares are there
    if (threadIdx.x == 0) {
      float total = 0.f;
      for (int warp = 0; warp < Shape::kWarps; ++warp) total += shares[warp];
      w.dslope(p, head.batch, head.head)[n_block] = total;
    }
  }

  // dK and dV pass through the rows of K and V; rows that nobody sees get their zeros here.
  __device__ __forceinline__ void finish() {
    __syncthreads();  // everybody has left K and V
    if (in_order()) pass_last_turn(-1);
    float dk_scale[AccK::kRowsPerThread], dv_scale[AccK::kRowsPerThread];
#pragma unroll
    for (int slot = 0; slot < AccK::kRowsPerThread; ++slot) {
      dk_scale[slot] = static_cast<float>(p.softmax_scale);
      dv_scale[slot] = 1.f;
    }
    store_tile<In, kDim, kDimParts>(acc_dk, smem.k, first_row(), dk_scale, dim_part());
    store_tile<In, kDim, kDimParts>(acc_dv, smem.v, first_row(), dv_scale, dim_part());
    __syncthreads();  // dK and dV are whole
    store_rows(p.dk, smem.k, p.head_dim);
    store_rows(p.dv, smem.v, p.head_dim_v);
  }

  __device__ __forceinline__ void store_rows(const View& view, const char* tile, int dim) {
    constexpr int kRows = kBlockN / Shape::kWarps;
    const int row = warp_id() * kRows, first = keys().begin + row;
    const int count = min_of(kRows, head.mask.seqlen_k - first);
    if (!view.data || count <= 0) return;
    char* data = static_cast<char*>(view.data) +
                 2 * view.at(head.batch, p.side_k.offset(head.batch), head_k);
    copy_out<kDim>(data, 2 * view.row_stride, dim, dim % 8 == 0, tile, row, first, count);
  }

  static __device__ __forceinline__ int dim_part() { return warp_id() % kDimParts; }
  // Of this warp's keys in the block.
  static __device__ __forceinline__ int first_row() { return warp_id() / kDimParts * kWarpKeys; }
  static __device__ __forceinline__ Range rows_of(int row_block) {
    return block_range(row_block, kBlockM);
  }
  __device__ __forceinline__ Range keys() const { return block_range(n_block, kBlockN); }
  __device__ __forceinline__ Range blocks() const { return blocks_of(rows, kBlockM); }
  __device__ __forceinline__ Range sequence() const { return {0, head.mask.seqlen_q}; }
  // The number of a query block in the workspace.
  __device__ __forceinline__ int block_of(int group_head, int row_block) const {
    return first_block + group_head * w.blocks_a_head + row_block;
  }

  const BwdParams& p;
  const BwdWorkspace& w;
  Storage& smem;
  const int n_block, head_k;
  BwdHead<Traits::kPlain> head;  // the query head of the current step
  const Range rows;              // those that see one of the keys
  const int first_block;         // of the group's first head in the workspace
  const CopyM copy_q, copy_dout;

  AccK acc_dk, acc_dv;
  int step_number = 0;
  int last_block = -1;  // whose turn this block has not passed on
  float dslope = 0.f;   // this thread's share
};

// kSmemBytes stands in the kernel's name, where tools/kernel_report.py reads it.
template <typename Traits, int kSmemBytes>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Shape::kMinBlocks)
    bwd_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdWorkspace w,
               const BandGrid grid) {
  extern __shared__ __align__(128) char storage[];
  int nth, head_k, batch;
  grid.locate(p.batch, p.num_heads_k, nth, head_k, batch);
  // The first keys have the longest columns of a causal mask; the deterministic order starts with
  // the last ones.
  const int n_block = p.deterministic ? static_cast<int>(grid.blocks) - 1 - nth : nth;
  BwdBlock<Traits>(p, w, *reinterpret_cast<BwdStorage<Traits>*>(storage), n_block, head_k, batch)
      .run();
}

template <typename Traits>
void launch_bwd_main(const BwdParams& p, const BwdWorkspace& w, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(BwdStorage<Traits>);
  const auto kernel = &bwd_kernel<Traits, kSmemBytes>;
  allow_smem(reinterpret_cast<const void*>(kernel), kSmemBytes);
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads_k;
  const int64_t head_bytes = max_of<int64_t>(
      1, int64_t{1} * p.group() * p.side_q.longest() * (6 * p.head_dim + 2 * p.head_dim_v));
  const BandGrid grid = BandGrid::of(w.key_blocks, heads, head_bytes);
  kernel<<<grid_size(heads * w.key_blocks), Traits::kThreads, kSmemBytes, stream>>>(p, w, grid);
  check(cudaGetLastError(), "a backward kernel");
}

template <typename Traits>
BwdWorkspace make_workspace(const BwdParams& p, size_t* bytes = nullptr) {
  using Shape = typename Traits::Shape;
  BwdWorkspace w;
  const size_t used =
      lay_out(w, p, static_cast<char*>(p.workspace), Shape::kBlockM, Shape::kBlockN, Traits::kDim);
  if (bytes) *bytes = used;
  return w;
}

// All kernels of a backward, in order.
template <typename Traits>
void launch_bwd(const BwdParams& p, const Launch& launch) {
  using In = typename Traits::In;
  using Shape = typename Traits::Shape;
  constexpr int kDim = Traits::kDim;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const BwdWorkspace w = make_workspace<Traits>(p);
  launch_bwd_prepare<In, kDim, Shape::kBlockM>(p, w, stream);
  launch_bwd_norm<In, kDim>(p, w, stream);
  if (w.key_blocks > 0 && (p.dv.data || main_needs_dscore(p)))
    launch_bwd_main<Traits>(p, w, stream);
  if (p.dq.data) launch_bwd_dq<In, kDim, Shape>(p, w, stream);
  if (p.dbias.data && dbias_is_broadcast(p)) launch_bwd_bias<In, kDim>(p, w, stream);
  if (p.dsinks || p.dalibi_slopes) launch_bwd_heads(p, w, Shape::kBlockN, stream);
}

// Calls f with the traits for the run-time features of a problem.
template <typename In, int kDim, int kSmemKB, typename F>
void with_bwd_traits(const BwdParams& p, F f) {
  const auto with_score = [&](auto score) {
    constexpr ScoreKind kScore = decltype(score)::value;
    if (p.dropout_threshold > 0)
      f(BwdTraits<In, kDim, kSmemKB, kScore, DropoutKind::kOn>{});
    else
      f(BwdTraits<In, kDim, kSmemKB, kScore, DropoutKind::kOff>{});
  };
  if (is_plain(p))
    with_score(Constant<ScoreKind::kPlain>{});
  else
    with_score(Constant<ScoreKind::kModified>{});
}

template <typename In, int kDim, int kSmemKB>
size_t bwd_workspace(const BwdParams& p) {
  size_t bytes = 0;
  with_bwd_traits<In, kDim, kSmemKB>(
      p, [&](auto traits) { make_workspace<decltype(traits)>(p, &bytes); });
  return bytes;
}

template <typename In, int kDim, int kSmemKB>
void bwd(const BwdParams& p, const Launch& launch) {
  with_bwd_traits<In, kDim, kSmemKB>(p,
                                     [&](auto traits) { launch_bwd<decltype(traits)>(p, launch); });
}

}  // namespace flash::cuda
