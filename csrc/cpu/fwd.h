// Forward on the CPU: FlashAttention-2's loop with a tile in a core's own cache.
//
// A task is one (sequence, head, block of query rows, split of the keys). Its rows are up to
// kMostTiles tiles, which take turns at each block of keys: k and v are loaded, converted and
// transposed once for all of them. It walks the key blocks that its rows see, keeps the running
// maximum, the running sum and the unnormalised output of each row, and normalises once at the end.
// Tasks share nothing; nobody waits. With num_splits > 1 a task writes its normalised part and its
// lse to the workspace, and a second pass merges the parts.
#pragma once

#include "score_tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

// Tiles of a task: as many as leave 64 cores busy. A row's bits do not depend on it, and so it is
// one with splits, whose keys are shared out by what a task's rows see.
constexpr int kMostTiles = 4, kFewestTasks = 64;

inline int tiles_of_task(const FwdParams& p) {
  if (p.splits() > 1) return 1;
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
  const int64_t tiles = heads * ceil_div(p.side_q.longest(), kBlockM);
  return static_cast<int>(clamp_to<int64_t>(tiles / kFewestTasks, 1, kMostTiles));
}

template <typename In>
class FwdTile {
  using T = Acc<In>;

 public:
  explicit FwdTile(const FwdParams& params)
      : p(params),
        num_rows(kBlockM * tiles_of_task(p)),
        ld_v(pad_cols(p.head_dim_v)),
        scores(params, num_rows),
        v(kBlockN * ld_v),
        acc_o(num_rows * ld_v),
        row_max(num_rows),
        row_sum(num_rows),
        factors(kBlockN) {}

  // The schedule of one task.
  void run(int batch, int head, int m_block, int split) {
    const Head<T> h(p, batch, head);
    const Range rows = intersect(block_range(m_block, num_rows), {0, h.seq.seqlen_q});
    if (rows.empty()) return;
    const Range seen = h.mask.keys_of(rows);
    const Range blocks = split_blocks(blocks_of(seen, kBlockN), split, p.splits());
    start(h, rows);
    for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
      const Range keys = block_range(n_block, kBlockN);
      scores.load_k(h, keys, seen);
      load_v(h, keys, seen);
      for (int first = 0; first < rows.size(); first += kBlockM) {
        const int begin = rows.begin + first;
        step(h, {begin, min_of(begin + kBlockM, rows.end)}, keys, first);
      }
    }
    finish(h, rows, split);
  }

 private:
  // One tile; first: its rows' place in the task.
  void step(const Head<T>& h, Range rows, Range keys, int first) {
    const Range seen = intersect(h.mask.keys_of(rows), keys);
    if (seen.empty()) return;
    scores.gemm_qk(rows, first);
    h.apply_score_and_mask(scores.s, rows, keys);
    online_softmax(rows, first);
    if (h.dropout.enabled()) drop(h, rows, keys);
    gemm_pv(rows, first, shifted(seen, keys.begin));
  }

  void start(const Head<T>& h, Range rows) {
    scores.load_q(h, rows);
    memset(static_cast<void*>(acc_o), 0, num_rows * ld_v * sizeof(T));
    for (int r = 0; r < num_rows; ++r) {
      row_max[r] = T(-INFINITY);
      row_sum[r] = T(0);
    }
  }

  void load_v(const Head<T>& h, Range keys, Range seen) {
    h.template load_keys<In>(v, ld_v, p.v, p.head_dim_v, keys, seen);
  }

  // s becomes p = exp(s - row_max); the sum and the output follow the maximum where it moved.
  void online_softmax(Range rows, int first) {
    constexpr int kLanes = VecOf<T>::kLanes;
    const auto larger = [](auto a, auto b) FLASH_HD_LAMBDA {
      return (b > a) | (b != b) ? b : a;  // NaN wins and stays
    };
    const auto add = [](auto a, auto b) FLASH_HD_LAMBDA { return a + b; };
    for (int r = 0; r < rows.size(); ++r) {
      T* row = scores.s + r * kBlockN;
      Vec<T> top = load<T>(row);
      for (int c = kLanes; c < kBlockN; c += kLanes) top = larger(top, load<T>(row + c));
      const T m_new = larger(row_max[first + r], fold<T>(top, larger));
      if (m_new == T(-INFINITY)) {  // nothing seen so far: s - m would be NaN
        memset(static_cast<void*>(row), 0, kBlockN * sizeof(T));
        continue;
      }
      Vec<T> sum = {};
      for (int c = 0; c < kBlockN; c += kExpVecs * kLanes) {
        ExpVecs<T> e;
        for (int i = 0; i < kExpVecs; ++i) e[i] = load<T>(row + c + i * kLanes) - splat(m_new);
        vec_exp(e);
        for (int i = 0; i < kExpVecs; ++i) store<T>(row + c + i * kLanes, e[i]);
        for (int i = 0; i < kExpVecs; ++i) sum += e[i];
      }
      const T total = fold<T>(sum, add);
      if (m_new != row_max[first + r])
        rescale(first + r, rescale_factor<T>(row_max[first + r], m_new));
      row_sum[first + r] += total;
      row_max[first + r] = m_new;
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

  // Over the keys that some row of this tile sees: others, which another tile of the task sees, may
  // hold a NaN, and P is zero there.
  void gemm_pv(Range rows, int first, Range c) {
    gemm<T>(rows.size(), p.head_dim_v, c.size(), {scores.s + c.begin, kBlockN, 1},
            v + c.begin * ld_v, ld_v, acc_o + first * ld_v, ld_v, Into::kAdd);
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
  const int num_rows;  // of a task
  const int ld_v;
  ScoreTile<In> scores;
  Buffer<T> v;        // (kBlockN, ld_v)
  Buffer<T> acc_o;    // (num_rows, ld_v)
  Buffer<T> row_max;  // (num_rows,)
  Buffer<T> row_sum;  // (num_rows,)
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
  const int64_t m_blocks = ceil_div(p.side_q.longest(), kBlockM * tiles_of_task(p));
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
