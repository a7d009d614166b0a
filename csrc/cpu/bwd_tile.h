// The backward's tile: P and dS of one (block of rows, block of keys), recomputed from lse.
#pragma once

#include "score_tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

// Parts of the workspace, in elements of acc.
template <typename T>
struct BwdWorkspace {
  T* delta;    // rows: sum_d dout out - dlse
  T* norm;     // rows: see row_norms
  T* dsinks;   // (batch, num_heads)
  T* dslopes;  // (chunks, batch, num_heads)
  T* dq;       // (chunks, rows, head_dim)

  // Key blocks of one head are shared out over this many tasks, each with a dq of its own: one when
  // there are heads enough to share, and never so many that dq outgrows the other tensors. A
  // function of shapes only, so that the number of threads never changes a bit.
  static int chunks(const BwdParams& p) {
    const int64_t tasks = max_of<int64_t>(1, static_cast<int64_t>(p.batch) * p.num_heads_k);
    const int64_t wanted = clamp_to<int64_t>(8 / tasks, 1, 4);
    return static_cast<int>(clamp_to<int64_t>(ceil_div(p.side_k.longest(), kBlockN), 1, wanted));
  }

  explicit BwdWorkspace(const BwdParams& p) {
    const int64_t rows = p.num_rows();
    const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
    delta = static_cast<T*>(p.workspace);
    norm = delta + rows;
    dsinks = norm + rows;
    dslopes = dsinks + heads;
    dq = dslopes + chunks(p) * heads;
  }

  static size_t bytes(const BwdParams& p) {
    const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
    const int64_t dq = p.dq.data ? chunks(p) * p.num_rows() * p.head_dim : 0;
    return sizeof(T) * (2 * p.num_rows() + (1 + chunks(p)) * heads + dq);
  }
};

template <typename In>
class BwdTile {
  using T = Acc<In>;

 public:
  explicit BwdTile(const BwdParams& params)
      : p(params),
        workspace(params),
        ld_v(pad_cols(p.head_dim_v)),
        scores(params),
        v(kBlockN * ld_v),
        v_t(ld_v * kBlockN),
        dout(kBlockM * ld_v),
        dp(kBlockM * kBlockN),
        score_grad(p.softcap > 0 ? kBlockM * kBlockN : 0),
        factors(kBlockN) {}

  void load_keys(const Head<T>& h, Range keys, Range seen) {
    scores.load_k(h, keys, seen);
    h.template load_keys<In>(v, ld_v, p.v, p.head_dim_v, keys, seen);
    transpose<T>(v_t, kBlockN, v, ld_v, kBlockN, p.head_dim_v);
  }

  void load_queries(const Head<T>& h, Range rows) {
    scores.load_q(h, rows);
    h.template load_queries<In>(dout, ld_v, p.dout, p.head_dim_v, rows);
  }

  // Leaves P (after dropout) in prob() and, when scores_grad, d loss / d score in dscore().
  void recompute(const Head<T>& h, Range rows, Range keys, bool scores_grad) {
    scores.gemm_qk(rows);
    if (scores_grad && p.softcap > 0) keep_score_grad(h, rows, keys);
    h.apply_score_and_mask(scores.s, rows, keys);
    if (scores_grad) {
      gemm<T>(rows.size(), kBlockN, p.head_dim_v, {dout, ld_v, 1}, v_t, kBlockN, dp, kBlockN,
              Into::kOverwrite);
    }
    for (int i = rows.begin; i < rows.end; ++i) {
      T* prob_row = scores.s + (i - rows.begin) * kBlockN;
      exponentiate(prob_row, h.row_index(i));
      if (h.dropout.enabled()) h.dropout_row(factors, i, keys);
      if (scores_grad) {
        grad_row(dp + (i - rows.begin) * kBlockN, prob_row, workspace.delta[h.row_index(i)],
                 h.dropout.enabled());
      }
      if (h.dropout.enabled())
        for (int c = 0; c < kBlockN; ++c) prob_row[c] *= factors[c];
    }
  }

  // dscore times d score / d product: what dq and dk are made of.
  void to_product_grad(const Head<T>& h, Range rows) {
    const T scale = h.score.scale;
    const int count = rows.size() * kBlockN;
    if (p.softcap > 0) {
      for (int e = 0; e < count; ++e) dp[e] = dp[e] == T(0) ? T(0) : dp[e] * score_grad[e];
    } else {
      for (int e = 0; e < count; ++e) dp[e] *= scale;
    }
  }

  T* prob() { return scores.s; }
  T* dscore() { return dp; }

  const BwdParams& p;
  const BwdWorkspace<T> workspace;
  const int ld_v;
  ScoreTile<In> scores;  // q, k, k_t and the tile of P
  Buffer<T> v;           // (kBlockN, ld_v)
  Buffer<T> v_t;         // (ld_v, kBlockN)
  Buffer<T> dout;        // (kBlockM, ld_v)

 private:
  void keep_score_grad(const Head<T>& h, Range rows, Range keys) {
    for (int i = rows.begin; i < rows.end; ++i) {
      const int64_t at = (i - rows.begin) * kBlockN;
      const int end = min_of(keys.end, h.seq.seqlen_k);
      for (int j = keys.begin; j < end; ++j) {
        const int64_t e = at + j - keys.begin;
        score_grad[e] = h.score.grad(scores.s[e], i, j);
      }
    }
  }

  void exponentiate(T* row, int64_t index) {
    constexpr int kLanes = VecOf<T>::kLanes;
    const T lse = static_cast<const T*>(p.lse)[index];
    const T subtract = lse == T(-INFINITY) ? T(INFINITY) : lse;  // a row that saw nothing: P = 0
    const T norm = workspace.norm[index];
    for (int c = 0; c < kBlockN; c += kExpVecs * kLanes) {
      ExpVecs<T> e;
      for (int i = 0; i < kExpVecs; ++i) e[i] = load<T>(row + c + i * kLanes) - splat(subtract);
      vec_exp(e);
      for (int i = 0; i < kExpVecs; ++i) store<T>(row + c + i * kLanes, e[i] * norm);
    }
  }

  // ds = p (dp keep - delta); exactly 0 where p is, whatever V held there.
  void grad_row(T* ds, const T* prob, T delta, bool dropped) {
    for (int c = 0; c < kBlockN; ++c) {
      const T kept = dropped ? ds[c] * factors[c] : ds[c];
      ds[c] = prob[c] == T(0) ? T(0) : prob[c] * (kept - delta);
    }
  }

  Buffer<T> dp;          // (kBlockM, kBlockN): dP, then dS
  Buffer<T> score_grad;  // (kBlockM, kBlockN), only with softcap
  Buffer<T> factors;     // (kBlockN,)
};

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
