// The tile of the backward's side kernels: scores of a few rows against a block of keys, recomputed
// with the main pass's own products, without dK and dV. Small blocks, one stage, no overlap: these
// kernels run rarely, or for a problem whose dbias is a sum.
#pragma once

#include "bwd_tile.cuh"

namespace flash::cuda {

template <typename In_, int kDim_>
struct ScanTile {
  using In = In_;
  static constexpr int kDim = kDim_;
  static constexpr int kBlockM = ScanShape::kBlockM;
  static constexpr int kBlockN = ScanShape::kBlockN;
  static constexpr int kThreads = ScanShape::kWarps * kWarpSize;
  using Acc = Accumulator<ScanShape::kWarpKeys, kBlockM>;
  using CopyM = TileCopy<kDim, kBlockM, kThreads>;
  using CopyN = TileCopy<kDim, kBlockN, kThreads>;

  // Of this warp's keys in the block.
  static __device__ __forceinline__ int first_row() { return warp_id() * ScanShape::kWarpKeys; }

  // keys x rows, the order of the additions being the main pass's.
  static __device__ __forceinline__ void gemm(Acc& acc, const char* key_tile,
                                              const char* row_tile) {
    acc.clear();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      OperandA<ScanShape::kWarpKeys> a;
      load_a<kDim, ScanShape::kWarpKeys>(a, smem_address(key_tile), first_row(), k);
      mma_abt<In, kDim>(acc, a, smem_address(row_tile), k);
    }
  }

  // Where the row values of scan block `m_block` start.
  static __device__ __forceinline__ int64_t first_value(const AttnParams& p, const BwdWorkspace& w,
                                                        int batch, int head, const SeqInfo& seq,
                                                        int m_block) {
    const int i = m_block * kBlockM;
    return w.block(p, batch, head, seq.offset_q, i / w.block_m) * w.block_m + i % w.block_m;
  }
};

}  // namespace flash::cuda
