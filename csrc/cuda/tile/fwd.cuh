// Forward of the tile class: FlashAttention-2's loop on matrix instructions that take register
// fragments.
//
// A block owns kBlockM query rows of one (sequence, head); a warp owns kWarpRows of them and shares
// no statistics with the others. K and V come in steps of kBlockN keys through two stages of shared
// memory: while step n is computed, the copy of step n - 1 is in flight. Steps run from the last
// key backwards, so that the masked tiles of a causal block come first.
//
// Who waits: once a step every thread waits for its own copies, then one block barrier says that
// everybody's have landed and that everybody has left the other stage, which the next copy fills.
// Nobody waits for another warp's products.
#pragma once

#include "../../common/dropout.h"
#include "../../common/score.h"
#include "../../common/softmax.h"
#include "../../common/tile_range.h"
#include "../../params.h"

#include "../launch.h"
#include "band_grid.h"
#include "kinds.h"

#include <config.h>
#include <copy.h>
#include <fragment.h>

#include "online.cuh"

namespace flash::cuda {

template <typename In_, int kDim_, int kSmemKB, ScoreKind kScore_, DropoutKind kDropout_,
          KeysKind kKeys_>
struct FwdTraits {
  using In = In_;
  using Config = FwdConfig<kDim_, kSmemKB>;
  using Shape = std::conditional_t<kScore_ == ScoreKind::kPlain, typename Config::Shape,
                                   typename Config::ModifiedShape>;
  static constexpr int kDim = kDim_;  // head_dim and head_dim_v, padded
  static constexpr int kThreads = Shape::kWarps * kWarpSize;
  static constexpr ScoreKind kScore = kScore_;
  static constexpr DropoutKind kDropout = kDropout_;
  using KeyCopy = TileCopy<kDim, Shape::kBlockN, kThreads,
                           std::conditional_t<kKeys_ == KeysKind::kPages, PageSource, RowSource>>;
};

template <typename Traits>
struct FwdStorage {
  using Shape = typename Traits::Shape;
  struct Stage {
    char k[Shape::kBlockN * Traits::kDim * 2];
    char v[Shape::kBlockN * Traits::kDim * 2];
  };
  char q[Shape::kBlockM * Traits::kDim * 2];  // later the block's O
  Stage stage[2];
};

template <typename Traits>
class FwdBlock {
  using In = typename Traits::In;
  using Shape = typename Traits::Shape;
  using Storage = FwdStorage<Traits>;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kBlockM = Shape::kBlockM;
  static constexpr int kBlockN = Shape::kBlockN;
  static constexpr int kWarpRows = Shape::kWarpRows;
  static constexpr int kSteps = kDim / 16;  // k16 steps of a score product
  static constexpr bool kPlain = Traits::kScore == ScoreKind::kPlain;
  using AccS = Accumulator<kWarpRows, kBlockN>;
  using AccO = Accumulator<kWarpRows, kDim>;
  static constexpr int kSlots = AccO::kRowsPerThread;

 public:
  __device__ __forceinline__ FwdBlock(const FwdParams& params, Storage& storage, int m_block,
                                      int head_, int batch_)
      : p(params),
        smem(storage),
        head(head_),
        batch(batch_),
        seq(seq_info(p.side_q, p.side_k, batch)),
        mask{seq.seqlen_q, seq.seqlen_k, p.window_left, p.window_right, seq.first_k},
        block_rows(block_range(m_block, kBlockM)),
        rows(intersect(block_rows, {0, seq.seqlen_q})),
        seen(mask.keys_of(rows)),
        first_row(m_block * kBlockM + warp_id() * kWarpRows),
        copy_k(p.k, batch, seq.offset_k, head / p.group(), p.head_dim, p.pages),
        copy_v(p.v, batch, seq.offset_k, head / p.group(), p.head_dim_v, p.pages) {}

  // The schedule of a block.
  __device__ __forceinline__ void run() {
    if (rows.empty()) return;
    const Range blocks = blocks_of(seen, kBlockN);
    start(blocks);
    for (int n_block = blocks.end - 1; n_block >= blocks.begin; --n_block) {
      copy_wait<0>();
      __syncthreads();  // step n_block has landed; everybody has left the other stage
      if (n_block > blocks.begin) load_kv(n_block - 1);
      copy_commit();
      if (mask.is_edge(kPlain ? rows : block_rows, block_range(n_block, kBlockN)))
        step<true>(n_block);
      else
        step<false>(n_block);
    }
    finish();
  }

 private:
  __device__ __forceinline__ void start(Range blocks) {
    const TileCopy<kDim, kBlockM, Traits::kThreads> copy_q(p.q, batch, seq.offset_q, head,
                                                           p.head_dim);
    copy_q.issue(smem.q, rows.begin, rows);
    if (!blocks.empty()) load_kv(blocks.end - 1);
    copy_commit();
    acc_o.clear();
    online.start(kPlain ? static_cast<float>(p.softmax_scale) * kLog2e : kLog2e);
    if (!kPlain) {
      score = make_score<float>(static_cast<float>(p.softmax_scale), static_cast<float>(p.softcap),
                                p.bias.of(batch, head), p.alibi_slopes.of(batch, head, 0.f),
                                mask.diagonal());
    }
    if (Traits::kDropout == DropoutKind::kOn)
      dropout = Dropout::make(p.rng_state, p.dropout_threshold);
  }

  __device__ __forceinline__ void load_kv(int n_block) {
    typename Storage::Stage& stage = smem.stage[n_block & 1];
    copy_k.issue(stage.k, n_block * kBlockN, seen);
    copy_v.issue(stage.v, n_block * kBlockN, seen);
  }

  // One tile: the same code for edges and the inside.
  template <bool kEdge>
  __device__ __forceinline__ void step(int n_block) {
    const Range keys = block_range(n_block, kBlockN);
    const uint32_t k = smem_address(smem.stage[n_block & 1].k);
    const uint32_t v = smem_address(smem.stage[n_block & 1].v);
    AccS acc_s;
    acc_s.clear();
    gemm_qk(acc_s, k);
    score_and_mask<kEdge>(acc_s, keys);
    online.update(acc_s, acc_o);
    if (Traits::kDropout == DropoutKind::kOn)  // after the sum: lse does not know of dropout
      apply_dropout(acc_s, dropout, batch, head, first_row, keys.begin);
    gemm_pv(acc_s, v);
  }

  __device__ __forceinline__ void gemm_qk(AccS& acc_s, uint32_t k_tile) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      OperandA<kWarpRows> q;
      load_a<kDim, kWarpRows>(q, smem_address(smem.q), warp_id() * kWarpRows, k);
      mma_abt<In, kDim>(acc_s, q, k_tile, k);
    }
  }

  template <bool kEdge>
  __device__ __forceinline__ void score_and_mask(AccS& acc_s, Range keys) {
    if (!kPlain) {
      score.for_each_active([&](auto modify) {
        acc_s.for_each([&](float& s, int slot, int col) {
          int i = first_row + AccS::row(slot), j = keys.begin + col;
          if (kEdge) {  // a bias has no element outside the sequence; the mask hides what is there
            i = min_of(i, seq.seqlen_q - 1);
            j = min_of(j, seq.seqlen_k - 1);
          }
          s = modify(s, i, j);
        });
      });
    }
    if (kEdge) {
      acc_s.for_each([&](float& s, int slot, int col) {
        const int i = first_row + AccS::row(slot), j = keys.begin + col;
        s = mask.sees(i, j) ? s : -INFINITY;
      });
    }
  }

  __device__ __forceinline__ void gemm_pv(const AccS& acc_s, uint32_t v_tile) {
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      mma_ab<In, kDim>(acc_o, as_operand<In>(acc_s, k), v_tile, k);
  }

  __device__ __forceinline__ void finish() {
    float out_scale[kSlots];
    const float to_natural = kPlain ? static_cast<float>(p.softmax_scale) : 1.f;
    const float sink = p.sinks.of(batch, head, -INFINITY);
    float* lse = static_cast<float*>(p.lse);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float row_max = online.row_max[slot];
      const float m = row_max == -INFINITY ? -INFINITY : row_max * to_natural;
      const RowEnd<float> end = finish_row(m, online.total(slot), sink);
      const int i = first_row + AccO::row(slot);
      if (AccO::owns_row() && i < rows.end) lse[p.row_index(batch, head, seq, i)] = end.lse;
      out_scale[slot] = end.out_scale;
    }
    store_o(out_scale);
  }

  // O passes through the rows of Q that only this warp reads.
  __device__ __forceinline__ void store_o(const float (&out_scale)[kSlots]) {
    copy_wait<0>();
    __syncthreads();  // a block whose loop was empty still has copies of Q in flight
    const int row = warp_id() * kWarpRows;
    store_tile<In, kDim>(acc_o, smem.q, row, out_scale);
    warp_barrier();
    const int count = min_of(kWarpRows, rows.end - first_row);
    char* data = static_cast<char*>(p.out.data) + 2 * p.out.at(batch, seq.offset_q, head);
    if (count > 0)
      copy_out<kDim>(data, 2 * p.out.row_stride, p.head_dim_v, p.head_dim_v % 8 == 0, smem.q, row,
                     first_row, count);
  }

  const FwdParams& p;
  Storage& smem;
  const int head, batch;
  const SeqInfo seq;
  const Mask mask;
  const Range
      block_rows;       // this block's, possibly past the end: a modifier would read a bias there
  const Range rows;     // those inside the sequence
  const Range seen;     // keys that they see
  const int first_row;  // of this warp
  const typename Traits::KeyCopy copy_k, copy_v;

  AccO acc_o;
  OnlineRows<AccS, AccO, Shape::kRescale> online;
  Score<float> score;
  Dropout dropout;
};

// kSmemBytes stands in the kernel's name, where tools/kernel_report.py reads it.
template <typename Traits, int kSmemBytes>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Shape::kMinBlocks)
    fwd_kernel(const __grid_constant__ FwdParams p, const BandGrid grid) {
  extern __shared__ __align__(128) char storage[];
  int nth, head, batch;
  grid.locate(p.batch, p.num_heads, nth, head, batch);
  // The longest rows of a causal mask start first, so that no long block is left for the end.
  const int m_block = static_cast<int>(grid.blocks) - 1 - nth;
  FwdBlock<Traits>(p, *reinterpret_cast<FwdStorage<Traits>*>(storage), m_block, head, batch).run();
}

template <typename Traits>
void launch_fwd(const FwdParams& p, const Launch& launch) {
  using Shape = typename Traits::Shape;
  constexpr int kSmemBytes = sizeof(FwdStorage<Traits>);
  const auto kernel = &fwd_kernel<Traits, kSmemBytes>;
  allow_smem(reinterpret_cast<const void*>(kernel), kSmemBytes);
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
  const int m_blocks = ceil_div(p.side_q.longest(), Shape::kBlockM);
  const int64_t head_bytes =
      max_of<int64_t>(1, int64_t{2} * p.side_k.longest() * (p.head_dim + p.head_dim_v) / p.group());
  const BandGrid grid = BandGrid::of(m_blocks, heads, head_bytes);
  kernel<<<grid_size(heads * m_blocks), Traits::kThreads, kSmemBytes,
           static_cast<cudaStream_t>(launch.stream)>>>(p, grid);
  check(cudaGetLastError(), "a forward kernel");
}

template <typename In, int kDim, int kSmemKB, KeysKind kKeys>
void fwd_over(const FwdParams& p, const Launch& launch) {
  const auto run = [&](auto score, auto dropout) {
    launch_fwd<
        FwdTraits<In, kDim, kSmemKB, decltype(score)::value, decltype(dropout)::value, kKeys>>(
        p, launch);
  };
  const auto with_score = [&](auto score) {
    if (p.dropout_threshold > 0)
      run(score, Constant<DropoutKind::kOn>{});
    else
      run(score, Constant<DropoutKind::kOff>{});
  };
  if (is_plain(p))
    with_score(Constant<ScoreKind::kPlain>{});
  else
    with_score(Constant<ScoreKind::kModified>{});
}

// The kernel for the run-time features of a problem.
template <typename In, int kDim, int kSmemKB>
void fwd(const FwdParams& p, const Launch& launch) {
  fwd_over<In, kDim, kSmemKB, KeysKind::kRows>(p, launch);
}

// Likewise, with keys in pages.
template <typename In, int kDim, int kSmemKB>
void fwd_paged(const FwdParams& p, const Launch& launch) {
  fwd_over<In, kDim, kSmemKB, KeysKind::kPages>(p, launch);
}

template <typename In, int kDim, int kSmemKB>
size_t fwd_workspace(const FwdParams&) {
  return 0;
}
template <typename In, int kDim, int kSmemKB>
size_t fwd_paged_workspace(const FwdParams&) {
  return 0;
}

}  // namespace flash::cuda
