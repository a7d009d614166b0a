// Forward on the CPU: FlashAttention-2's loop with a tile in a core's own cache.
//
// A task is one (sequence, head, block of query rows, split of the keys). It walks the key blocks
// that its rows see, keeps the running maximum, the running sum and the unnormalised output of each
// row, and normalises once at the end. Tasks share nothing; nobody waits. With num_splits > 1 a
// task writes its normalised part and its lse to the workspace, and a second pass merges the parts.
#pragma once

#include "score_tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename In>
class FwdTile {
  using T = Acc<In>;

 public:
  explicit FwdTile(const FwdParams& params)
      : p(params),
        ld_v(pad_cols(p.head_dim_v)),
        scores(params),
        v(kBlockN * ld_v),
        acc_o(kBlockM * ld_v),
        row_max(kBlockM),
        row_sum(kBlockM),
        factors(kBlockN) {}

  // The schedule of one task.
  void run(int batch, int head, int m_block, int split) {
    const Head<T> h(p, batch, head);
    const Range rows = intersect(block_range(m_block, kBlockM), {0, h.seq.seqlen_q});
    if (rows.empty()) return;
    const Range seen = h.mask.keys_of(rows);
    const Range blocks = split_blocks(blocks_of(seen, kBlockN), split, p.splits());
    start(h, rows);
    for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
      const Range keys = block_range(n_block, kBlockN);
      scores.load_k(h, keys, seen);
      scores.gemm_qk(rows);
      h.apply_score_and_mask(scores.s, rows, keys);
      online_softmax(rows);
      if (h.dropout.enabled()) drop(h, rows, keys);
      load_v(h, keys, seen);
      gemm_pv(rows);
    }
    finish(h, rows, split);
  }

 private:
  void start(const Head<T>& h, Range rows) {
    scores.load_q(h, rows);
    memset(static_cast<void*>(acc_o), 0, kBlockM * ld_v * sizeof(T));
    for (int r = 0; r < kBlockM; ++r) {
      row_max[r] = T(-INFINITY);
      row_sum[r] = T(0);
    }
  }

  void load_v(const Head<T>& h, Range keys, Range seen) {
    h.template load_keys<In>(v, ld_v, p.v, p.head_dim_v, keys, seen);
  }

  // s becomes p = exp(s - row_max); the sum and the output follow the maximum where it moved.
  void online_softmax(Range rows) {
    constexpr int kLanes = VecOf<T>::kLanes;
    for (int r = 0; r < rows.size(); ++r) {
      T* row = scores.s + r * kBlockN;
      Vec<T> top = load<T>(row);
      for (int c = kLanes; c < kBlockN; c += kLanes) {
        const Vec<T> x = load<T>(row + c);
        top = (x > top) | (x != x) ? x : top;  // NaN wins and stays
      }
      T m_new = row_max[r];
      for (int lane = 0; lane < kLanes; ++lane)
        m_new = top[lane] > m_new || top[lane] != top[lane] ? top[lane] : m_new;
      if (m_new == T(-INFINITY)) {  // nothing seen so far: s - m would be NaN
        memset(static_cast<void*>(row), 0, kBlockN * sizeof(T));
        continue;
      }
      Vec<T> sum = {};
      for (int c = 0; c < kBlockN; c += kLanes) {
        const Vec<T> e = vec_exp(load<T>(row + c) - splat(m_new));
        store<T>(row + c, e);
        sum += e;
      }
      T total = T(0);
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
      if (m_new != row_max[r]) rescale(r, rescale_factor<T>(row_max[r], m_new));
      row_sum[r] += total;
      row_max[r] = m_new;
    }
  }

  void rescale(int r, T factor) {
    row_sum[r] *= factor;
    T* o = acc_o + r * ld_v;
    for (int d = 0; d < p.head_dim_v; ++d) o[d] *= factor;
  }

  // After the sum: lse does not know of dropout.
  void drop(const Head<T>& h, Range rows, Range keys) {
    for (int r = 0; r < rows.size(); ++r) {
      h.dropout_row(factors, rows.begin + r, keys);
      T* row = scores.s + r * kBlockN;
      for (int c = 0; c < kBlockN; ++c) row[c] *= factors[c];
    }
  }

  void gemm_pv(Range rows) {
    gemm<T>(rows.size(), p.head_dim_v, kBlockN, {scores.s, kBlockN, 1}, v, ld_v, acc_o, ld_v,
            Into::kAdd);
  }

  // The sink belongs to one part only: the first.
  void finish(const Head<T>& h, Range rows, int split) {
    T* lse = static_cast<T*>(p.lse);
    T* part_o = nullptr;
    if (p.splits() > 1) {
      lse = static_cast<T*>(p.workspace) + split * p.num_rows();
      part_o = static_cast<T*>(p.workspace) + p.splits() * p.num_rows() +
               split * p.num_rows() * p.head_dim_v;
    }
    for (int r = 0; r < rows.size(); ++r) {
      const T sink = split == 0 ? h.sink : T(-INFINITY);
      const RowEnd<T> end = finish_row<T>(row_max[r], row_sum[r], sink);
      const int64_t at = h.row_index(rows.begin + r);
      lse[at] = end.lse;
      row_sum[r] = end.out_scale;
      if (part_o) {
        for (int d = 0; d < p.head_dim_v; ++d)
          part_o[at * p.head_dim_v + d] = acc_o[r * ld_v + d] * end.out_scale;
      }
    }
    if (!part_o) {
      store_rows<In>(p.out, h.batch, h.head, h.seq.offset_q, rows.begin, rows.size(), p.head_dim_v,
                     acc_o, ld_v, row_sum);
    }
  }

  const FwdParams& p;
  const int ld_v;
  ScoreTile<In> scores;
  Buffer<T> v;        // (kBlockN, ld_v)
  Buffer<T> acc_o;    // (kBlockM, ld_v)
  Buffer<T> row_max;  // (kBlockM,)
  Buffer<T> row_sum;  // (kBlockM,)
  Buffer<T> factors;  // (kBlockN,)
};

// Joins the parts of one row: out = sum_s exp(lse_s - lse) out_s.
template <typename In>
inline void combine_row(const FwdParams& p, const Head<Acc<In>>& h, int i, Acc<In>* row) {
  using T = Acc<In>;
  const int64_t at = h.row_index(i), rows = p.num_rows();
  const T* part_lse = static_cast<const T*>(p.workspace);
  const T* part_o = part_lse + p.splits() * rows;
  T m = T(-INFINITY), sum = T(0);
  for (int s = 0; s < p.splits(); ++s) {
    const T x = part_lse[s * rows + at];
    m = x > m || x != x ? x : m;
  }
  memset(static_cast<void*>(row), 0, p.head_dim_v * sizeof(T));
  for (int s = 0; s < p.splits() && m != T(-INFINITY); ++s) {
    const T weight = exp_of(part_lse[s * rows + at] - m);
    sum += weight;
    for (int d = 0; d < p.head_dim_v; ++d)
      row[d] += weight * part_o[(s * rows + at) * p.head_dim_v + d];
  }
  const RowEnd<T> end = finish_row<T>(m, sum, T(-INFINITY));
  static_cast<T*>(p.lse)[at] = end.lse;
  store_rows<In>(p.out, h.batch, h.head, h.seq.offset_q, i, 1, p.head_dim_v, row, 0,
                 &end.out_scale);
}

template <typename In>
size_t fwd_workspace(const FwdParams& p) {
  if (p.splits() <= 1) return 0;
  return sizeof(Acc<In>) * p.splits() * p.num_rows() * (1 + p.head_dim_v);
}

template <typename In>
void fwd(const FwdParams& p, const Launch& launch) {
  const int64_t m_blocks = ceil_div(p.side_q.longest(), kBlockM);
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
  parallel(launch, heads * m_blocks * p.splits(), [&](int64_t begin, int64_t end) {
    FwdTile<In> tile(p);
    for (int64_t task = begin; task < end; ++task) {
      const int split = static_cast<int>(task % p.splits());
      const int64_t block = task / p.splits(), head = block / m_blocks;
      tile.run(static_cast<int>(head / p.num_heads), static_cast<int>(head % p.num_heads),
               static_cast<int>(block % m_blocks), split);
    }
  });
  if (p.splits() <= 1) return;
  parallel(launch, heads, [&](int64_t begin, int64_t end) {
    Buffer<Acc<In>> row(p.head_dim_v);
    for (int64_t task = begin; task < end; ++task) {
      const Head<Acc<In>> h(p, static_cast<int>(task / p.num_heads),
                            static_cast<int>(task % p.num_heads));
      for (int i = 0; i < h.seq.seqlen_q; ++i) combine_row<In>(p, h, i, row);
    }
  });
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
