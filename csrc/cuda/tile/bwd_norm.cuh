// Row normalisers of the rows whose lse is too large to keep its digits (needs_renormalising): the
// sum of exp(s - lse) over the row, 1 but for rounding elsewhere. A block whose rows are all of the
// ordinary kind, which is nearly every one, ends after one look.
#pragma once

#include "bwd_scan.cuh"

namespace flash::cuda {

template <typename Tile>
struct NormStorage {
  char q[Tile::kBlockM * Tile::kDim * 2];
  char k[Tile::kBlockN * Tile::kDim * 2];
  float sum[ScanShape::kWarps][Tile::kBlockM];
};

template <typename Tile>
__device__ __forceinline__ void bwd_norm(const BwdParams& p, const BwdWorkspace& w,
                                         NormStorage<Tile>& smem, int m_block, int head_,
                                         int batch) {
  using Acc = typename Tile::Acc;
  const SeqInfo seq = seq_info(p.side_q, p.side_k, batch);
  const Range rows = intersect(block_range(m_block, Tile::kBlockM), {0, seq.seqlen_q});
  if (rows.empty()) return;
  const int64_t first = Tile::first_value(p, w, batch, head_, seq, m_block);
  const int row = min_of(static_cast<int>(threadIdx.x), rows.size() - 1);  // one thread a row
  const bool large = w.shift[first + row] == kLargeRow;
  if (!__syncthreads_or(large)) return;

  const BwdHead<false> head(p, batch, head_);
  const float lse =
      static_cast<const float*>(p.lse)[p.row_index(batch, head_, seq, rows.begin + row)];
  if (threadIdx.x < rows.size()) w.large_anchor[first + row] = lse * head.anchor_factor(p);
  const Range seen = head.mask.keys_of(rows);
  const Range blocks = blocks_of(seen, Tile::kBlockN);
  typename Tile::CopyM(p.q, batch, seq.offset_q, head_, p.head_dim).issue(smem.q, rows.begin, rows);
  const typename Tile::CopyN copy_k(p.k, batch, seq.offset_k, head_ / p.group(), p.head_dim);
  float sum[Acc::kColsPerThread] = {};
  for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
    __syncthreads();  // everybody has left K; the anchors are written
    copy_k.issue(smem.k, n_block * Tile::kBlockN, seen);
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // K, and Q, have landed
    Acc s;
    Tile::gemm(s, smem.k, smem.q);
    const int first_key = n_block * Tile::kBlockN + Tile::first_row();
    head.template apply_score<true>(s, rows.begin, first_key);
    float anchor[Acc::kColsPerThread];
#pragma unroll
    for (int c = 0; c < Acc::kColsPerThread; ++c)
      anchor[c] = w.large_anchor[first + min_of(Acc::col(c), rows.size() - 1)];
    Acc::for_each_place([&](const typename Acc::Place& at) {
      const int i = rows.begin + at.col, j = first_key + Acc::row(at.slot);
      const float x = exp2_approx((s(at) - anchor[at.col_slot]) * head.exp_scale);
      sum[at.col_slot] += head.mask.sees(i, j) ? x : 0.f;
    });
  }
#pragma unroll
  for (int c = 0; c < Acc::kColsPerThread; ++c) {
    const float of_warp = Acc::sum_column(sum[c]);
    if (Acc::owns_column()) smem.sum[warp_id()][Acc::col(c)] = of_warp;
  }
  copy_wait<0>();
  __syncthreads();  // every warp's sums are there
  if (threadIdx.x >= rows.size()) return;
  float total = exp_of(p.sinks.of(batch, head_, -INFINITY) - lse);
  for (int warp = 0; warp < ScanShape::kWarps; ++warp) total += smem.sum[warp][row];
  w.large_shift[first + row] = log2f(total);
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    bwd_norm_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdWorkspace w,
                    const RowGrid grid) {
  extern __shared__ __align__(128) char storage[];
  int m_block, head, batch;
  grid.locate(p, m_block, head, batch);
  bwd_norm<Tile>(p, w, *reinterpret_cast<NormStorage<Tile>*>(storage), m_block, head, batch);
}

template <typename In, int kDim>
void launch_bwd_norm(const BwdParams& p, const BwdWorkspace& w, cudaStream_t stream) {
  using Tile = ScanTile<In, kDim>;
  constexpr int kSmemBytes = sizeof(NormStorage<Tile>);
  const auto kernel = &bwd_norm_kernel<Tile>;
  allow_smem(reinterpret_cast<const void*>(kernel), kSmemBytes);
  const RowGrid grid = RowGrid::of(p, Tile::kBlockM);
  kernel<<<grid.blocks(p), Tile::kThreads, kSmemBytes, stream>>>(p, w, grid);
  check(cudaGetLastError(), "the backward's row normalisers");
}

}  // namespace flash::cuda
