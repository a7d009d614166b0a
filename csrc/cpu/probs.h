// The probabilities themselves, on request: p = exp(s - lse) before dropout, the sign bit set where
// dropout removes the entry. The only kernel that writes seqlen_q x seqlen_k numbers.
#pragma once

#include "score_tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename In>
class ProbsTile {
  using T = Acc<In>;

 public:
  explicit ProbsTile(const ProbsParams& params)
      : p(params), scores(params), norm(kBlockM), factors(kBlockN) {}

  void run(int batch, int head, int m_block) {
    const Head<T> h(p, batch, head);
    const Range rows = intersect(block_range(m_block, kBlockM), {0, h.seq.seqlen_q});
    if (rows.empty()) return;
    const T* lse = static_cast<const T*>(p.lse);
    scores.load_q(h, rows);
    row_norms<In>(scores, h, rows, lse, norm);
    const Range seen = h.mask.keys_of(rows);
    const Range blocks = blocks_of(seen, kBlockN);
    for (int n_block = blocks.begin; n_block < blocks.end; ++n_block) {
      const Range keys = block_range(n_block, kBlockN);
      scores.load_k(h, keys, seen);
      scores.gemm_qk(rows);
      h.apply_score_and_mask(scores.s, rows, keys);
      for (int i = rows.begin; i < rows.end; ++i) store_row(h, i, i - rows.begin, keys, lse);
    }
  }

 private:
  void store_row(const Head<T>& h, int i, int r, Range keys, const T* lse) {
    const T lse_i = lse[h.row_index(i)];
    const int64_t row = (static_cast<int64_t>(h.batch) * p.num_heads + h.head);
    In* out = static_cast<In*>(p.probs) + (row * p.side_q.max_seqlen + i) * p.side_k.max_seqlen +
              keys.begin;
    if (h.dropout.enabled()) h.dropout_row(factors, i, keys);
    const int count = min_of(keys.end, h.seq.seqlen_k) - keys.begin;
    for (int c = 0; c < count; ++c) {
      T prob = lse_i == T(-INFINITY) ? T(0) : exp_of(scores.s[r * kBlockN + c] - lse_i) * norm[r];
      if (h.dropout.enabled() && factors[c] == T(0)) prob = -prob;
      out[c] = from_acc<In>(prob);
    }
  }

  const ProbsParams& p;
  ScoreTile<In> scores;
  Buffer<T> norm;     // (kBlockM,)
  Buffer<T> factors;  // (kBlockN,)
};

template <typename In>
size_t probs_workspace(const ProbsParams&) {
  return 0;
}

template <typename In>
void probs(const ProbsParams& p, const Launch& launch) {
  const int64_t m_blocks = ceil_div(p.side_q.longest(), kBlockM);
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads;
  parallel(launch, heads * m_blocks, [&](int64_t begin, int64_t end) {
    ProbsTile<In> tile(p);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / m_blocks;
      tile.run(static_cast<int>(head / p.num_heads), static_cast<int>(head % p.num_heads),
               static_cast<int>(task % m_blocks));
    }
  });
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
