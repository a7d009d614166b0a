// After the backward's main pass: dQ in its own type, and the few numbers a head of dsinks and
// dalibi_slopes. Sums run in a fixed order.
#pragma once

#include "bwd_tile.cuh"

namespace flash::cuda {

// One block a tile of dQ; a warp reads what the warp of the same number added.
template <typename In, int kDim, typename Shape>
__device__ __forceinline__ void bwd_dq(const BwdParams& p, const BwdWorkspace& w, char* tile,
                                       int m_block, int head, int batch) {
  constexpr int kRows = Shape::kBlockM / Shape::kDqRowParts;
  constexpr int kCols = kDim / Shape::kDqColParts;
  constexpr int kChunks = Shape::kDqChunks;
  using Acc = Accumulator<kRows, kCols / kChunks>;
  const SeqInfo seq = seq_info(p.side_q, p.side_k, batch);
  if (m_block * Shape::kBlockM >= seq.seqlen_q) return;
  const int64_t block = w.block(p, batch, head, seq.offset_q, m_block);
  const float* source = w.dq + block * w.tile_floats + warp_id() * (kRows * kCols);
  float scale[Acc::kRowsPerThread];
#pragma unroll
  for (int slot = 0; slot < Acc::kRowsPerThread; ++slot)
    scale[slot] = static_cast<float>(p.softmax_scale);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    Acc acc;
    load_from_global(acc, source + chunk * (kRows * kCols / kChunks));
    store_tile<In, kDim, Shape::kDqColParts, kChunks>(acc, tile,
                                                      warp_id() / Shape::kDqColParts * kRows, scale,
                                                      warp_id() % Shape::kDqColParts, chunk);
  }
  __syncthreads();  // the tile is whole
  constexpr int kCopyRows = Shape::kBlockM / Shape::kWarps;
  const int row = warp_id() * kCopyRows, first = m_block * Shape::kBlockM + row;
  const int count = min_of(kCopyRows, seq.seqlen_q - first);
  char* data = static_cast<char*>(p.dq.data) + 2 * p.dq.at(batch, seq.offset_q, head);
  if (count > 0)
    copy_out<kDim>(data, 2 * p.dq.row_stride, p.head_dim, p.head_dim % 8 == 0, tile, row, first,
                   count);
}

template <typename In, int kDim, typename Shape>
__global__ void __launch_bounds__(Shape::kWarps* kWarpSize)
    bwd_dq_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdWorkspace w,
                  const RowGrid grid) {
  __shared__ __align__(128) char tile[Shape::kBlockM * kDim * 2];
  int m_block, head, batch;
  grid.locate(p, m_block, head, batch);
  bwd_dq<In, kDim, Shape>(p, w, tile, m_block, head, batch);
}

template <typename In, int kDim, typename Shape>
void launch_bwd_dq(const BwdParams& p, const BwdWorkspace& w, cudaStream_t stream) {
  const RowGrid grid = RowGrid::of(p, Shape::kBlockM);
  bwd_dq_kernel<In, kDim, Shape>
      <<<grid.blocks(p), Shape::kWarps * kWarpSize, 0, stream>>>(p, w, grid);
  check(cudaGetLastError(), "the conversion of dq");
}

constexpr int kHeadThreads = 256;

// The sum over a block, the same in every thread; `shares` has room for one value a warp.
__device__ __forceinline__ float sum_block(float x, float* shares) {
  const float of_warp = sum_lanes<kWarpSize>(x);
  __syncthreads();  // everybody has left the shares
  if (lane_id() == 0) shares[warp_id()] = of_warp;
  __syncthreads();  // all shares are there
  float sum = 0.f;
  for (int warp = 0; warp < kHeadThreads / kWarpSize; ++warp) sum += shares[warp];
  return sum;
}

// This thread's share of dsink of one (sequence, head): -sum_i p_sink delta_i.
__device__ __forceinline__ float dsink_share(const BwdParams& p, const BwdWorkspace& w, int batch,
                                             int head) {
  const SeqInfo seq = seq_info(p.side_q, p.side_k, batch);
  const float sink = p.sinks.of(batch, head, -INFINITY);
  const float* lse = static_cast<const float*>(p.lse);
  float sum = 0.f;
  for (int i = threadIdx.x; i < seq.seqlen_q; i += kHeadThreads) {
    const float x = lse[p.row_index(batch, head, seq, i)];
    if (x == -INFINITY) continue;
    const int64_t at =
        w.block(p, batch, head, seq.offset_q, i / w.block_m) * w.block_m + i % w.block_m;
    const float left = w.shift[at] == kLargeRow ? exp2f(-w.large_shift[at]) : 1.f;
    sum -= exp_of(sink - x) * left * w.delta[at];
  }
  return sum;
}

// One block a head.
static __global__ void __launch_bounds__(kHeadThreads)
    bwd_heads_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdWorkspace w,
                     int block_n) {
  __shared__ float shares[kHeadThreads / kWarpSize];
  const int head = blockIdx.x;
  float dsink = 0.f, dslope = 0.f;
  for (int batch = 0; batch < p.batch; ++batch) {
    if (p.dsinks) dsink += sum_block(dsink_share(p, w, batch, head), shares);
    if (!p.dalibi_slopes) continue;
    const int blocks = ceil_div(p.side_k.length(batch), block_n);
    float share = 0.f;
    for (int n = threadIdx.x; n < blocks; n += kHeadThreads) share += w.dslope(p, batch, head)[n];
    const float sum = sum_block(share, shares);
    dslope += sum;
    if (p.alibi_slopes.batch_stride != 0 && threadIdx.x == 0)
      static_cast<float*>(p.dalibi_slopes)[batch * p.num_heads + head] = sum;
  }
  if (threadIdx.x != 0) return;
  if (p.dsinks) static_cast<float*>(p.dsinks)[head] = dsink;
  if (p.dalibi_slopes && p.alibi_slopes.batch_stride == 0)
    static_cast<float*>(p.dalibi_slopes)[head] = dslope;
}

static void launch_bwd_heads(const BwdParams& p, const BwdWorkspace& w, int block_n,
                             cudaStream_t stream) {
  bwd_heads_kernel<<<static_cast<unsigned>(p.num_heads), kHeadThreads, 0, stream>>>(p, w, block_n);
  check(cudaGetLastError(), "the gradients a head");
}

}  // namespace flash::cuda
