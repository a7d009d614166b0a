// The gradient of a broadcast bias: one task a cell of dbias, which loops over the broadcast
// dimensions and recomputes dS there. No atomics, and the order of the sum is fixed.
#pragma once

#include "../bias_grad.h"
#include "bwd_tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename In>
class BwdBias {
  using T = Acc<In>;

 public:
  explicit BwdBias(const BwdParams& params)
      : p(params), d(p.dbias), tile(params), cell(kBlockM * kBlockN), part(kBlockM * kBlockN) {}

  void run(int own_batch, int own_head, int own_m, int own_n) {
    memset(static_cast<void*>(cell), 0, kBlockM * kBlockN * sizeof(T));
    const Range batches = sweep(d.batch_stride, own_batch, p.batch);
    const Range heads = sweep(d.head_stride, own_head, p.num_heads);
    const Range ms = sweep(d.row_stride, own_m, ceil_div(p.side_q.max_seqlen, kBlockM));
    const Range ns = sweep(d.key_stride, own_n, ceil_div(p.side_k.max_seqlen, kBlockN));
    for (int batch = batches.begin; batch < batches.end; ++batch)
      for (int head = heads.begin; head < heads.end; ++head)
        for (int n = ns.begin; n < ns.end; ++n)
          for (int m = ms.begin; m < ms.end; ++m) add(Head<T>(p, batch, head), m, n);
    store(own_batch, own_head, own_m, own_n);
  }

 private:
  void add(const Head<T>& h, int m_block, int n_block) {
    const Range rows = intersect(block_range(m_block, kBlockM), {0, h.seq.seqlen_q});
    const Range keys = block_range(n_block, kBlockN);
    const Range seen = h.mask.keys_of(rows);
    if (rows.empty() || intersect(keys, seen).empty()) return;
    tile.load_keys(h, keys, seen);
    tile.load_queries(h, rows);
    tile.recompute(h, rows, keys, true);
    // A tile's own sum first: one chain over every score of a broadcast bias would lose its digits.
    memset(static_cast<void*>(part), 0, kBlockM * kBlockN * sizeof(T));
    const int end = min_of(keys.end, h.seq.seqlen_k);
    for (int i = rows.begin; i < rows.end; ++i)
      for (int j = keys.begin; j < end; ++j) {
        const int r = d.row_stride == 0 ? 0 : i - rows.begin;
        const int c = d.key_stride == 0 ? 0 : j - keys.begin;
        part[r * kBlockN + c] += tile.dscore()[(i - rows.begin) * kBlockN + j - keys.begin];
      }
    for (int e = 0; e < kBlockM * kBlockN; ++e) cell[e] += part[e];
  }

  void store(int batch, int head, int m_block, int n_block) {
    const int row_end =
        d.row_stride == 0 ? 1 : min_of((m_block + 1) * kBlockM, p.side_q.max_seqlen);
    const int key_end =
        d.key_stride == 0 ? 1 : min_of((n_block + 1) * kBlockN, p.side_k.max_seqlen);
    for (int i = m_block * kBlockM; i < row_end; ++i)
      for (int j = n_block * kBlockN; j < key_end; ++j)
        store_bias_grad(d, batch, head, i, j,
                        cell[(i - m_block * kBlockM) * kBlockN + j - n_block * kBlockN]);
  }

  const BwdParams& p;
  const BiasView& d;
  BwdTile<In> tile;
  Buffer<T> cell;  // (kBlockM, kBlockN), or its first row or column when broadcast
  Buffer<T> part;  // the same, one tile's share
};

template <typename In>
void bwd_bias(const BwdParams& p, const Launch& launch) {
  const BiasView& d = p.dbias;
  const int64_t batches = d.batch_stride == 0 ? 1 : p.batch;
  const int64_t heads = d.head_stride == 0 ? 1 : p.num_heads;
  const int64_t ms = d.row_stride == 0 ? 1 : ceil_div(p.side_q.max_seqlen, kBlockM);
  const int64_t ns = d.key_stride == 0 ? 1 : ceil_div(p.side_k.max_seqlen, kBlockN);
  parallel(launch, batches * heads * ms * ns, [&](int64_t begin, int64_t end) {
    BwdBias<In> bias(p);
    for (int64_t task = begin; task < end; ++task)
      bias.run(static_cast<int>(task / (heads * ms * ns)),
               static_cast<int>(task / (ms * ns) % heads), static_cast<int>(task / ns % ms),
               static_cast<int>(task % ns));
  });
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
