// Before the backward's main pass: row values, and an empty dQ.
//
// One block per (block of query rows, head, sequence), no block waits for another. A few
// neighbouring lanes share a row of out and dout.
#pragma once

#include "../../common/softmax.h"

#include "../launch.h"
#include "bwd_workspace.h"

#include <fragment.h>

namespace flash::cuda {

// What every launch over query blocks finds its block by.
struct RowGrid {
  unsigned m_blocks;

  __device__ __forceinline__ void locate(const AttnParams& p, int& m_block, int& head,
                                         int& batch) const {
    m_block = static_cast<int>(blockIdx.x % m_blocks);
    const unsigned at = blockIdx.x / m_blocks;
    head = static_cast<int>(at % static_cast<unsigned>(p.num_heads));
    batch = static_cast<int>(at / static_cast<unsigned>(p.num_heads));
  }
  static RowGrid of(const AttnParams& p, int block_m) {
    return {static_cast<unsigned>(ceil_div(p.side_q.longest(), block_m))};
  }
  unsigned blocks(const AttnParams& p) const {
    return grid_size(static_cast<int64_t>(p.batch) * p.num_heads * m_blocks);
  }
};

// The product of eight 16-bit elements of two rows, of which `count` exist.
template <typename In>
__device__ __forceinline__ float dot_8(const char* a, const char* b, int count) {
  const uint4 x = *reinterpret_cast<const uint4*>(a), y = *reinterpret_cast<const uint4*>(b);
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int shift = 16 * (i % 2);
    const float product = to_float<In>(static_cast<uint16_t>(xs[i / 2] >> shift)) *
                          to_float<In>(static_cast<uint16_t>(ys[i / 2] >> shift));
    sum += i < count ? product : 0.f;
  }
  return sum;
}

template <typename In, int kDim, int kBlockM>
class BwdPrepare {
  static constexpr int kLanes = kDim <= 64 ? 8 : kDim <= 128 ? 16 : 32;  // of a row

 public:
  static constexpr int kThreads = 256;

  __device__ __forceinline__ static void run(const BwdParams& p, const BwdWorkspace& w, int m_block,
                                             int head, int batch) {
    const SeqInfo seq = seq_info(p.side_q, p.side_k, batch);
    if (m_block * kBlockM >= seq.seqlen_q) return;
    const int64_t block = w.block(p, batch, head, seq.offset_q, m_block);
    if (p.dq.data) clear(w, block, p.deterministic);
    const float* lse = static_cast<const float*>(p.lse);
    const float* dlse = static_cast<const float*>(p.dlse);
    for (int r = threadIdx.x / kLanes; r < kBlockM; r += kThreads / kLanes) {
      const int i = m_block * kBlockM + r;
      const bool inside = i < seq.seqlen_q;
      const float dot = inside ? dot_of_row(p, batch, head, seq.offset_q + i) : 0.f;
      const float sum = sum_lanes<kLanes>(dot);
      if (threadIdx.x % kLanes != 0) continue;
      const int64_t at = block * kBlockM + r;
      const int64_t row = inside ? p.row_index(batch, head, seq, i) : 0;
      const float x = inside ? lse[row] : -INFINITY;
      const bool seen = x != -INFINITY;
      w.delta[at] = dlse && seen ? sum - dlse[row] : sum;
      w.shift[at] = !seen ? INFINITY : needs_renormalising(x) ? kLargeRow : x * kLog2e;
    }
  }

 private:
  // This lane's share of sum_d dout out.
  __device__ __forceinline__ static float dot_of_row(const BwdParams& p, int batch, int head,
                                                     int64_t row) {
    const int d = threadIdx.x % kLanes * 8;
    if (d >= p.head_dim_v) return 0.f;
    return dot_8<In>(static_cast<const char*>(p.out.data) + 2 * (p.out.at(batch, row, head) + d),
                     static_cast<const char*>(p.dout.data) + 2 * (p.dout.at(batch, row, head) + d),
                     p.head_dim_v - d);
  }

  __device__ __forceinline__ static void clear(const BwdWorkspace& w, int64_t block,
                                               bool deterministic) {
    float4* tile = reinterpret_cast<float4*>(w.dq + block * (kBlockM * kDim));
    for (int at = threadIdx.x; at < kBlockM * kDim / 4; at += kThreads)
      tile[at] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (deterministic && threadIdx.x == 0) w.turns[block] = 0;
  }
};

template <typename In, int kDim, int kBlockM>
__global__ void __launch_bounds__(BwdPrepare<In, kDim, kBlockM>::kThreads)
    bwd_prepare_kernel(const __grid_constant__ BwdParams p, const BwdWorkspace w,
                       const RowGrid grid) {
  int m_block, head, batch;
  grid.locate(p, m_block, head, batch);
  BwdPrepare<In, kDim, kBlockM>::run(p, w, m_block, head, batch);
}

template <typename In, int kDim, int kBlockM>
void launch_bwd_prepare(const BwdParams& p, const BwdWorkspace& w, cudaStream_t stream) {
  const RowGrid grid = RowGrid::of(p, kBlockM);
  bwd_prepare_kernel<In, kDim, kBlockM>
      <<<grid.blocks(p), BwdPrepare<In, kDim, kBlockM>::kThreads, 0, stream>>>(p, w, grid);
  check(cudaGetLastError(), "the backward's first kernel");
}

}  // namespace flash::cuda
