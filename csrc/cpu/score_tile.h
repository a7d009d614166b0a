// The product S = Q K^T of one tile, which every pass starts from, and the row normalisers of the
// passes that start from lse.
#pragma once

#include "head.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename In>
class ScoreTile {
  using T = Acc<In>;

 public:
  // rows_q: of q, which the tile holds; a multiple of kBlockM.
  explicit ScoreTile(const AttnParams& params, int rows_q = kBlockM)
      : p(params),
        ld(pad_cols(p.head_dim)),
        num_rows_q(rows_q),
        q(rows_q * ld),
        k(kBlockN * ld),
        k_t(ld * kBlockN),
        s(kBlockM * kBlockN) {}

  void load_q(const Head<T>& h, Range rows) {
    h.template load_queries<In>(q, ld, p.q, p.head_dim, rows, num_rows_q);
  }

  void load_k(const Head<T>& h, Range keys, Range seen) {
    h.template load_keys<In>(k, ld, p.k, p.head_dim, keys, seen);
    transpose<T>(k_t, kBlockN, k, ld, kBlockN, p.head_dim);
  }

  // first: where in q these rows, at most kBlockM, begin.
  void gemm_qk(Range rows, int first = 0) {
    gemm<T>(rows.size(), kBlockN, p.head_dim, {q + first * ld, ld, 1}, k_t, kBlockN, s, kBlockN,
            Into::kOverwrite);
  }

  const AttnParams& p;
  const int ld;
  const int num_rows_q;
  Buffer<T> q;    // (num_rows_q, ld)
  Buffer<T> k;    // (kBlockN, ld)
  Buffer<T> k_t;  // (ld, kBlockN)
  Buffer<T> s;    // (kBlockM, kBlockN): products, then scores, then what the pass makes of them
};

// norm[r] = 1 / sum_j exp(s_rj - lse_r) with the sink's term: 1 up to rounding, and so left at 1,
// unless lse is too large to keep the row's digits (needs_renormalising). Overwrites the tile's s
// and k; q must be loaded.
template <typename In>
void row_norms(ScoreTile<In>& tile, const Head<Acc<In>>& h, Range rows, const Acc<In>* lse,
               Acc<In>* norm) {
  using T = Acc<In>;
  bool any = false;
  for (int r = 0; r < rows.size(); ++r) {
    norm[r] = T(1);
    any |= needs_renormalising(lse[h.row_index(rows.begin + r)]);
  }
  if (!any) return;
  for (int r = 0; r < rows.size(); ++r) {
    const T x = lse[h.row_index(rows.begin + r)];
    norm[r] = needs_renormalising(x) ? exp_of(h.sink - x) : T(1);
  }
  const Range seen = h.mask.keys_of(rows);
  const Range blocks = blocks_of(seen, kBlockN);
  for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
    const Range keys = block_range(n_block, kBlockN);
    tile.load_k(h, keys, seen);
    tile.gemm_qk(rows);
    h.apply_score_and_mask(tile.s, rows, keys);
    for (int r = 0; r < rows.size(); ++r) {
      const T x = lse[h.row_index(rows.begin + r)];
      if (!needs_renormalising(x)) continue;
      for (int c = 0; c < kBlockN; ++c) norm[r] += exp_of(tile.s[r * kBlockN + c] - x);
    }
  }
  for (int r = 0; r < rows.size(); ++r) norm[r] = T(1) / norm[r];
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
