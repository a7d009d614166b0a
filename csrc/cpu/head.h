// One (sequence, head) of a problem: its lengths and policies.
#pragma once

#include "../common/dropout.h"
#include "../common/score.h"
#include "../common/softmax.h"
#include "../common/tile_range.h"
#include "tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename T>
struct Head {
  const AttnParams& p;
  int batch;
  int head;
  int head_k;
  SeqInfo seq;
  Mask mask;
  Score<T> score;
  Dropout dropout;
  T sink;         // -inf: none
  bool is_plain;  // the score is the scaled product, nothing else

  Head(const AttnParams& params, int b, int h)
      : p(params),
        batch(b),
        head(h),
        head_k(h / params.group()),
        seq(seq_info(params.side_q, params.side_k, b)),
        mask{seq.seqlen_q, seq.seqlen_k, params.window_left, params.window_right, seq.first_k},
        score(make_score<T>(static_cast<T>(params.softmax_scale), static_cast<T>(params.softcap),
                            params.bias.of(b, h), params.alibi_slopes.of(b, h, T(0)),
                            mask.diagonal())),
        dropout(Dropout::make(params.rng_state, params.dropout_threshold)),
        sink(params.sinks.of(b, h, T(-INFINITY))),
        is_plain(params.softcap == 0 && !params.bias.data && !params.alibi_slopes.data) {}

  int64_t row_index(int i) const { return p.row_index(batch, head, seq, i); }

  // Rows of this head into a tile, see load_rows; view is q's or shaped like it, or k's or v's.
  template <typename In>
  void load_queries(T* tile, int ld, const View& view, int dim, Range rows,
                    int count = kBlockM) const {
    const auto at = [&](int i) { return view.at(batch, seq.offset_q + i, head); };
    load_rows<In>(tile, ld, view, at, rows.begin, count, dim, rows);
  }
  template <typename In>
  void load_keys(T* tile, int ld, const View& view, int dim, Range keys, Range seen) const {
    const auto at = [&](int j) { return p.key_at(view, batch, seq, j, head_k); };
    load_rows<In>(tile, ld, view, at, keys.begin, kBlockN, dim, seen);
  }

  // Products (kBlockM, kBlockN) -> masked scores, in place. Masked entries become -inf.
  void apply_score_and_mask(T* tile, Range rows, Range keys) const {
    const bool is_edge = mask.is_edge(rows, keys);
    for (int i = rows.begin; i < rows.end; ++i) {
      T* row = tile + (i - rows.begin) * kBlockN;
      if (is_plain) {
        const T scale = score.scale;
        for (int c = 0; c < kBlockN; ++c) row[c] *= scale;
      } else {
        // Never beyond the sequence: a bias has no element there.
        const int end = min_of(keys.end, seq.seqlen_k);
        for (int j = keys.begin; j < end; ++j)
          row[j - keys.begin] = score.apply(row[j - keys.begin], i, j);
      }
      if (is_edge) {
        for (int c = 0; c < kBlockN; ++c)
          row[c] = mask.sees(i, keys.begin + c) ? row[c] : T(-INFINITY);
      }
    }
  }

  // keep_scale where row i keeps key keys.begin + c, 0 where it drops it. keys.begin is a multiple
  // of the dropout group.
  void dropout_row(T* factors, int i, Range keys) const {
    // Not dropout's own scale, which is a float: float64 keeps its digits.
    const T scale = static_cast<T>(256) / static_cast<T>(max_of(256 - dropout.threshold, 1));
    for (int t = 0; t < 4; ++t) {
      const Philox4 random = dropout.bytes(batch, head, i, keys.begin / Dropout::kGroup, t);
      for (int n = 0; n < 8; ++n)
        for (int c = 0; c < 2; ++c)
          factors[8 * n + 2 * t + c] = dropout.keep_byte(random, n, c) ? scale : T(0);
    }
  }
};

static_assert(kBlockN == Dropout::kGroup, "dropout_row fills one tile row from one group");

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
