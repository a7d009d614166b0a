// The gradient of a broadcast bias: one block a cell of dbias, (rows, keys) of one tile, which
// loops over the broadcast dimensions and recomputes dS there. No atomics, and the order of the sum
// is fixed. The first dimensions are the usual ones to broadcast; a bias that is broadcast over
// rows and keys too has one block a head, which walks over all tiles.
#pragma once

#include "../../bias_grad.h"
#include "bwd_scan.cuh"

namespace flash::cuda {

template <typename Tile>
struct BiasStorage {
  char q[Tile::kBlockM * Tile::kDim * 2];
  char dout[Tile::kBlockM * Tile::kDim * 2];
  char k[Tile::kBlockN * Tile::kDim * 2];  // in the end the cell, key by key, in float
  char v[Tile::kBlockN * Tile::kDim * 2];
  float shift[Tile::kBlockM];
  float delta[Tile::kBlockM];
};

// Which cell of dbias a block owns.
struct BiasGrid {
  unsigned heads, m_blocks, n_blocks;  // 1 where broadcast

  __device__ __forceinline__ void locate(int& batch, int& head, int& m_block, int& n_block) const {
    unsigned at = blockIdx.x;
    n_block = static_cast<int>(at % n_blocks);
    at /= n_blocks;
    m_block = static_cast<int>(at % m_blocks);
    at /= m_blocks;
    head = static_cast<int>(at % heads);
    batch = static_cast<int>(at / heads);
  }
};

template <typename Tile>
class BwdBias {
  using Acc = typename Tile::Acc;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static_assert(kBlockM * kBlockN * sizeof(float) <= 2 * sizeof(BiasStorage<Tile>::k), "a cell");

 public:
  __device__ __forceinline__ BwdBias(const BwdParams& params, const BwdWorkspace& workspace,
                                     BiasStorage<Tile>& storage)
      : p(params), w(workspace), d(params.dbias), smem(storage) {}

  __device__ __forceinline__ void run(int own_batch, int own_head, int own_m, int own_n) {
    cell.clear();
    const Range batches = sweep(d.batch_stride, own_batch, p.batch);
    const Range heads = sweep(d.head_stride, own_head, p.num_heads);
    const Range ms = sweep(d.row_stride, own_m, ceil_div(p.side_q.max_seqlen, kBlockM));
    const Range ns = sweep(d.key_stride, own_n, ceil_div(p.side_k.max_seqlen, kBlockN));
    for (int batch = batches.begin; batch < batches.end; ++batch)
      for (int head = heads.begin; head < heads.end; ++head)
        for (int n = ns.begin; n < ns.end; ++n)
          for (int m = ms.begin; m < ms.end; ++m) add(BwdHead<false>(p, batch, head), m, n);
    store(own_batch, own_head, own_m, own_n);
  }

 private:
  __device__ __forceinline__ void add(const BwdHead<false>& h, int m_block, int n_block) {
    const Range rows = intersect(block_range(m_block, kBlockM), {0, h.mask.seqlen_q});
    const Range keys = block_range(n_block, kBlockN);
    const Range seen = h.mask.keys_of(rows);
    if (rows.empty() || intersect(keys, seen).empty()) return;
    const SeqInfo seq = seq_info(p.side_q, p.side_k, h.batch);
    const int64_t first = Tile::first_value(p, w, h.batch, h.head, seq, m_block);
    load(h, seq, rows, keys, seen, first);
    Acc s, dp;
    Tile::gemm(s, smem.k, smem.q);
    Tile::gemm(dp, smem.v, smem.dout);
    const RowValues values = {smem.shift, smem.delta, w.large_anchor + first,
                              w.large_shift + first};
    // Dropout with a threshold of 0 keeps everything, so one kernel serves both.
    tile_grads<true, true>(s, dp, h, values, rows.begin, keys.begin + Tile::first_row(), true,
                           [&](const typename Acc::Place& at, float ds) { cell(at) += ds; });
  }

  __device__ __forceinline__ void load(const BwdHead<false>& h, const SeqInfo& seq, Range rows,
                                       Range keys, Range seen, int64_t first_value) {
    const int head_k = h.head / p.group();
    __syncthreads();  // everybody has left the tiles
    typename Tile::CopyM(p.q, h.batch, seq.offset_q, h.head, p.head_dim)
        .issue(smem.q, rows.begin, rows);
    typename Tile::CopyM(p.dout, h.batch, seq.offset_q, h.head, p.head_dim_v)
        .issue(smem.dout, rows.begin, rows);
    typename Tile::CopyN(p.k, h.batch, seq.offset_k, head_k, p.head_dim)
        .issue(smem.k, keys.begin, seen);
    typename Tile::CopyN(p.v, h.batch, seq.offset_k, head_k, p.head_dim_v)
        .issue(smem.v, keys.begin, seen);
    copy_row_values<kBlockM>(smem.shift, w.shift + first_value, threadIdx.x);
    copy_row_values<kBlockM>(smem.delta, w.delta + first_value, threadIdx.x - kBlockM / 4);
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // they have landed
  }

  __device__ __forceinline__ void store(int batch, int head, int m_block, int n_block) {
    float* sums = reinterpret_cast<float*>(smem.k);  // (kBlockN, kBlockM)
    __syncthreads();                                 // everybody has left K and V
    Acc::for_each_place([&](const typename Acc::Place& at) {
      sums[(Tile::first_row() + Acc::row(at.slot)) * kBlockM + at.col] = cell(at);
    });
    __syncthreads();  // the cell is whole
    const int row_end = d.row_stride == 0 ? 1 : p.side_q.max_seqlen - m_block * kBlockM;
    const int key_end = d.key_stride == 0 ? 1 : p.side_k.max_seqlen - n_block * kBlockN;
    for (int e = threadIdx.x; e < kBlockM * kBlockN; e += Tile::kThreads) {
      const int key = e % kBlockN, row = e / kBlockN;
      if (row >= row_end || key >= key_end) continue;
      const Range ks = sweep(d.key_stride, key, kBlockN), rs = sweep(d.row_stride, row, kBlockM);
      float sum = 0.f;
      for (int k = ks.begin; k < ks.end; ++k) {
        float of_key = 0.f;  // a chain over every element would lose its digits
        for (int r = rs.begin; r < rs.end; ++r) of_key += sums[k * kBlockM + r];
        sum += of_key;
      }
      store_bias_grad(d, batch, head, m_block * kBlockM + row, n_block * kBlockN + key, sum);
    }
  }

  const BwdParams& p;
  const BwdWorkspace& w;
  const BiasView& d;
  BiasStorage<Tile>& smem;
  Acc cell;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    bwd_bias_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdWorkspace w,
                    const BiasGrid grid) {
  extern __shared__ __align__(128) char storage[];
  int batch, head, m_block, n_block;
  grid.locate(batch, head, m_block, n_block);
  BwdBias<Tile>(p, w, *reinterpret_cast<BiasStorage<Tile>*>(storage))
      .run(batch, head, m_block, n_block);
}

template <typename In, int kDim>
void launch_bwd_bias(const BwdParams& p, const BwdWorkspace& w, cudaStream_t stream) {
  using Tile = ScanTile<In, kDim>;
  constexpr int kSmemBytes = sizeof(BiasStorage<Tile>);
  const auto kernel = &bwd_bias_kernel<Tile>;
  allow_smem(reinterpret_cast<const void*>(kernel), kSmemBytes);
  const BiasView& d = p.dbias;
  const auto cells = [](int64_t stride, int count) {
    return static_cast<unsigned>(stride == 0 ? 1 : count);
  };
  const BiasGrid grid = {cells(d.head_stride, p.num_heads),
                         cells(d.row_stride, ceil_div(p.side_q.max_seqlen, Tile::kBlockM)),
                         cells(d.key_stride, ceil_div(p.side_k.max_seqlen, Tile::kBlockN))};
  const int64_t blocks =
      int64_t{cells(d.batch_stride, p.batch)} * grid.heads * grid.m_blocks * grid.n_blocks;
  if (blocks == 0) return;
  kernel<<<grid_size(blocks), Tile::kThreads, kSmemBytes, stream>>>(p, w, grid);
  check(cudaGetLastError(), "the gradient of a broadcast bias");
}

}  // namespace flash::cuda
