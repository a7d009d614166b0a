// Backward on the CPU: recomputation from lse, parallel over key blocks, no atomics.
//
// Three passes, each over tasks that share nothing:
//   preprocess  (sequence, head): delta = sum_d dout out - dlse, row normalisers, dsinks
//   main        (sequence, key head, chunk of key blocks): the five products. dk and dv of a key
//               block stay with the task, a group's query heads one after the other; dq goes to the
//               chunk's own accumulator
//   finish      (sequence, head): sums the chunks of dq in order
// A broadcast dbias has a kernel of its own (bwd_bias.h). The result never depends on the number of
// threads: the deterministic mode is the only one.
#pragma once

#include "bwd_bias.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename In>
class BwdMain {
  using T = Acc<In>;

 public:
  explicit BwdMain(const BwdParams& params)
      : p(params),
        needs_dscore(main_needs_dscore(params)),
        tile(params),
        dk(kBlockN * tile.scores.ld),
        dv(kBlockN * tile.ld_v),
        dq(kBlockM * tile.scores.ld) {}

  void run(int batch, int head_k, int chunk) {
    const Head<T> first(p, batch, head_k * p.group());
    clear_dq(first, chunk);
    const Range all_keys = {0, first.seq.seqlen_k};
    const Range seen = first.mask.keys_of({0, first.seq.seqlen_q});
    const Range blocks =
        split_blocks(blocks_of(all_keys, kBlockN), chunk, tile.workspace.chunks(p));
    for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
      const Range keys = block_range(n_block, kBlockN);
      start_block(first, keys, seen);
      for (int head = first.head; head < first.head + p.group(); ++head) {
        const Head<T> h(p, batch, head);
        const Range m_blocks = blocks_of(h.mask.rows_of(keys), kBlockM);
        for (int m_block = m_blocks.begin; m_block < m_blocks.end; ++m_block)
          step(h, intersect(block_range(m_block, kBlockM), {0, h.seq.seqlen_q}), keys, chunk);
      }
      store_block(first, intersect(keys, all_keys));
    }
  }

 private:
  void clear_dq(const Head<T>& first, int chunk) {
    for (int head = first.head; head < first.head + p.group(); ++head) {
      const Head<T> h(p, first.batch, head);
      tile.workspace.dslopes[slope_index(h, chunk)] = T(0);
      if (p.dq.data && h.seq.seqlen_q > 0)
        memset(static_cast<void*>(dq_row(h, 0, chunk)), 0, sizeof(T) * h.seq.seqlen_q * p.head_dim);
    }
  }

  void start_block(const Head<T>& first, Range keys, Range seen) {
    tile.load_keys(first, keys, seen);
    memset(static_cast<void*>(dk), 0, kBlockN * tile.scores.ld * sizeof(T));
    memset(static_cast<void*>(dv), 0, kBlockN * tile.ld_v * sizeof(T));
  }

  void step(const Head<T>& h, Range rows, Range keys, int chunk) {
    tile.load_queries(h, rows);
    tile.recompute(h, rows, keys, needs_dscore);
    // Only rows that see this block, only keys that these rows see: what lies outside multiplies a
    // zero, and a zero times NaN must not come into being.
    const Range r = shifted(intersect(rows, h.mask.rows_of(keys)), rows.begin);
    const Range c = shifted(intersect(keys, h.mask.keys_of(rows)), keys.begin);
    if (p.dv.data) {
      gemm<T>(kBlockN, p.head_dim_v, r.size(), {tile.prob() + r.begin * kBlockN, 1, kBlockN},
              tile.dout + r.begin * tile.ld_v, tile.ld_v, dv, tile.ld_v, Into::kAdd);
    }
    if (!needs_dscore) return;
    if (p.dalibi_slopes) add_dslope(h, rows, keys, chunk);
    if (p.dbias.data && !dbias_is_broadcast(p)) store_dbias(h, rows, keys);
    tile.to_product_grad(h, rows);
    const int ld = tile.scores.ld;
    if (p.dk.data) {
      gemm<T>(kBlockN, p.head_dim, r.size(), {tile.dscore() + r.begin * kBlockN, 1, kBlockN},
              tile.scores.q + r.begin * ld, ld, dk, ld, Into::kAdd);
    }
    if (p.dq.data) {
      gemm<T>(rows.size(), p.head_dim, c.size(), {tile.dscore() + c.begin, kBlockN, 1},
              tile.scores.k + c.begin * ld, ld, dq, ld, Into::kOverwrite);
      for (int i = rows.begin; i < rows.end; ++i) {
        T* sum = dq_row(h, i, chunk);
        for (int d = 0; d < p.head_dim; ++d) sum[d] += dq[(i - rows.begin) * ld + d];
      }
    }
  }

  // d score / d slope = -distance
  void add_dslope(const Head<T>& h, Range rows, Range keys, int chunk) {
    const int end = min_of(keys.end, h.seq.seqlen_k);
    T sum = T(0);
    for (int i = rows.begin; i < rows.end; ++i) {
      const T* ds = tile.dscore() + (i - rows.begin) * kBlockN;
      for (int j = keys.begin; j < end; ++j)
        sum -= ds[j - keys.begin] * Alibi<T>{T(0), h.mask.diagonal()}.distance(i, j);
    }
    tile.workspace.dslopes[slope_index(h, chunk)] += sum;
  }

  void store_dbias(const Head<T>& h, Range rows, Range keys) {
    const int end = min_of(keys.end, h.seq.seqlen_k);
    for (int i = rows.begin; i < rows.end; ++i)
      for (int j = keys.begin; j < end; ++j)
        store_bias_grad(p.dbias, h.batch, h.head, i, j,
                        tile.dscore()[(i - rows.begin) * kBlockN + j - keys.begin]);
  }

  // Every key of the block belongs to this task: rows that nobody sees get their zeros here.
  void store_block(const Head<T>& h, Range keys) {
    if (p.dk.data)
      store_rows<In>(p.dk, h.batch, h.head_k, h.seq.offset_k, keys.begin, keys.size(), p.head_dim,
                     dk, tile.scores.ld);
    if (p.dv.data)
      store_rows<In>(p.dv, h.batch, h.head_k, h.seq.offset_k, keys.begin, keys.size(), p.head_dim_v,
                     dv, tile.ld_v);
  }

  int64_t slope_index(const Head<T>& h, int chunk) const {
    return (static_cast<int64_t>(chunk) * p.batch + h.batch) * p.num_heads + h.head;
  }
  T* dq_row(const Head<T>& h, int i, int chunk) const {
    return tile.workspace.dq + (chunk * p.num_rows() + h.row_index(i)) * p.head_dim;
  }

  const BwdParams& p;
  const bool needs_dscore;
  BwdTile<In> tile;
  Buffer<T> dk;  // (kBlockN, ld)
  Buffer<T> dv;  // (kBlockN, ld_v)
  Buffer<T> dq;  // (kBlockM, ld): this tile's part
};

// delta, normalisers and the sink's gradient of one head.
template <typename In>
void bwd_preprocess(const BwdParams& p, BwdTile<In>& tile, int batch, int head) {
  using T = Acc<In>;
  const Head<T> h(p, batch, head);
  const BwdWorkspace<T>& w = tile.workspace;
  const T* lse = static_cast<const T*>(p.lse);
  const T* dlse = static_cast<const T*>(p.dlse);
  T dsink = T(0);
  for (int begin = 0; begin < h.seq.seqlen_q; begin += kBlockM) {
    const Range rows = intersect({begin, begin + kBlockM}, {0, h.seq.seqlen_q});
    tile.scores.load_q(h, rows);
    row_norms<In>(tile.scores, h, rows, lse, w.norm + h.row_index(begin));
    for (int i = rows.begin; i < rows.end; ++i) {
      const int64_t at = h.row_index(i);
      const In* o = static_cast<const In*>(p.out.data) + p.out.at(batch, h.seq.offset_q + i, head);
      const In* g =
          static_cast<const In*>(p.dout.data) + p.dout.at(batch, h.seq.offset_q + i, head);
      T sum = T(0);
      for (int d = 0; d < p.head_dim_v; ++d) sum += to_acc(o[d]) * to_acc(g[d]);
      w.delta[at] = dlse && lse[at] != T(-INFINITY) ? sum - dlse[at] : sum;
      if (p.dsinks && lse[at] != T(-INFINITY))
        dsink -= exp_of(h.sink - lse[at]) * w.norm[at] * w.delta[at];
    }
  }
  w.dsinks[static_cast<int64_t>(batch) * p.num_heads + head] = dsink;
}

template <typename In>
void bwd_finish_dq(const BwdParams& p, int batch, int head) {
  using T = Acc<In>;
  const Head<T> h(p, batch, head);
  const BwdWorkspace<T> w(p);
  Buffer<T> sum(p.head_dim);
  for (int i = 0; i < h.seq.seqlen_q; ++i) {
    memset(static_cast<void*>(sum), 0, p.head_dim * sizeof(T));
    for (int chunk = 0; chunk < w.chunks(p); ++chunk) {
      const T* part = w.dq + (chunk * p.num_rows() + h.row_index(i)) * p.head_dim;
      for (int d = 0; d < p.head_dim; ++d) sum[d] += part[d];
    }
    store_rows<In>(p.dq, batch, head, h.seq.offset_q, i, 1, p.head_dim, sum, 0);
  }
}

// dsinks and dalibi_slopes: a few numbers a head, summed in order by one thread.
template <typename T>
void bwd_finish_heads(const BwdParams& p) {
  const BwdWorkspace<T> w(p);
  T* dsinks = static_cast<T*>(p.dsinks);
  T* dslopes = static_cast<T*>(p.dalibi_slopes);
  for (int head = 0; head < p.num_heads; ++head) {
    if (dsinks) dsinks[head] = T(0);
    if (dslopes && p.alibi_slopes.batch_stride == 0) dslopes[head] = T(0);
    for (int b = 0; b < p.batch; ++b) {
      const int64_t at = static_cast<int64_t>(b) * p.num_heads + head;
      if (dsinks) dsinks[head] += w.dsinks[at];
      if (!dslopes) continue;
      T sum = T(0);
      for (int chunk = 0; chunk < w.chunks(p); ++chunk)
        sum += w.dslopes[static_cast<int64_t>(chunk) * p.batch * p.num_heads + at];
      if (p.alibi_slopes.batch_stride == 0)
        dslopes[head] += sum;
      else
        dslopes[at] = sum;
    }
  }
}

template <typename In>
size_t bwd_workspace(const BwdParams& p) {
  return BwdWorkspace<Acc<In>>::bytes(p);
}

template <typename In>
void bwd(const BwdParams& p, const Launch& launch) {
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
  parallel(launch, heads, [&](int64_t begin, int64_t end) {
    BwdTile<In> tile(p);
    for (int64_t task = begin; task < end; ++task)
      bwd_preprocess<In>(p, tile, static_cast<int>(task / p.num_heads),
                         static_cast<int>(task % p.num_heads));
  });
  const int chunks = BwdWorkspace<Acc<In>>::chunks(p);
  if (p.dv.data || main_needs_dscore(p)) {
    const int64_t tasks = static_cast<int64_t>(p.batch) * p.num_heads_k * chunks;
    parallel(launch, tasks, [&](int64_t begin, int64_t end) {
      BwdMain<In> main(p);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t head = task / chunks;
        main.run(static_cast<int>(head / p.num_heads_k), static_cast<int>(head % p.num_heads_k),
                 static_cast<int>(task % chunks));
      }
    });
  }
  if (p.dq.data) {
    parallel(launch, heads, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        bwd_finish_dq<In>(p, static_cast<int>(task / p.num_heads),
                          static_cast<int>(task % p.num_heads));
    });
  }
  if (p.dbias.data && dbias_is_broadcast(p)) bwd_bias<In>(p, launch);
  if (p.dsinks || p.dalibi_slopes) bwd_finish_heads<Acc<In>>(p);
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
