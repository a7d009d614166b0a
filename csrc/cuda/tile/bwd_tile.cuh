// What the backward's kernels share: one head's policies, and the way from the products S = Q K^T
// and dP = dO V^T of a tile to P and dS.
//
// Tiles are transposed: their rows are keys, their columns query rows. So P^T and dS^T, as they lie
// in a warp's registers, are the first operands of dV = P^T dO and dK = dS^T Q.
#pragma once

#include "../../common/dropout.h"
#include "../../common/score.h"
#include "bwd_prepare.cuh"
#include "kinds.h"

#include <config.h>
#include <copy.h>

namespace flash::cuda {

// One (sequence, head). What the mainloop can read again from its parameters is not kept.
template <bool kPlain>
struct BwdHead {
  int batch, head;
  Mask mask;
  float exp_scale;     // from the unit of a score to powers of two
  Score<float> score;  // unused when plain
  Dropout dropout;
  bool modified;

  __device__ __forceinline__ BwdHead(const AttnParams& p, int batch_, int head_)
      : batch(batch_),
        mask{p.side_q.length(batch_), p.side_k.length(batch_), p.window_left, p.window_right},
        dropout(Dropout::make(p.rng_state, p.dropout_threshold)) {
    set_head(p, head_);
  }

  __device__ __forceinline__ void set_head(const AttnParams& p, int head_) {
    head = head_;
    const float scale = static_cast<float>(p.softmax_scale);
    // Not a compile-time choice where kPlain is false: a side kernel serves both kinds and must
    // make the very scores of the main pass.
    modified = !kPlain && !is_plain(p);
    exp_scale = modified ? kLog2e : scale * kLog2e;
    if (!kPlain)
      score = make_score<float>(scale, static_cast<float>(p.softcap), p.bias.of(batch, head),
                                p.alibi_slopes.of(batch, head, 0.f), mask.diagonal());
  }

  // From natural units to that of a score; a plain problem's scale is positive.
  __device__ __forceinline__ float anchor_factor(const AttnParams& p) const {
    return modified ? 1.f : 1.f / static_cast<float>(p.softmax_scale);
  }

  // Products become scores, in place.
  template <bool kEdge, typename Acc>
  __device__ __forceinline__ void apply_score(Acc& s, int first_row, int first_key) const {
    if (kPlain || !modified) return;
    score.for_each_active([&](auto modify) {
      Acc::for_each_place([&](const typename Acc::Place& at) {
        int i = first_row + at.col, j = first_key + Acc::row(at.slot);
        if (kEdge) {  // a bias has no element outside the sequence; the mask hides what is there
          i = min_of(i, mask.seqlen_q - 1);
          j = min_of(j, mask.seqlen_k - 1);
        }
        s(at) = modify(s(at), i, j);
      });
    });
  }
};

// The scores of large rows relative to the row's lse, so that no digit is lost; `shift` becomes
// what is left to subtract. Out of the way: a warp comes here only where it has such a row.
template <typename Acc>
__device__ __forceinline__ void settle_large(Acc& s, float (&shift)[Acc::kColsPerThread],
                                             const float* large_anchor, const float* large_shift) {
  float anchor[Acc::kColsPerThread];
#pragma unroll
  for (int c = 0; c < Acc::kColsPerThread; ++c) {
    const bool large = shift[c] == kLargeRow;
    anchor[c] = large ? large_anchor[Acc::col(c)] : 0.f;
    shift[c] = large ? large_shift[Acc::col(c)] : shift[c];
  }
  Acc::for_each_place([&](const typename Acc::Place& at) { s(at) -= anchor[at.col_slot]; });
}

// Row values of one tile's query rows.
struct RowValues {
  const float* shift;         // shared memory
  const float* delta;         // shared memory
  const float* large_anchor;  // global memory
  const float* large_shift;   // global memory
};

// Scores become probabilities p = exp(s - lse), 0 where masked.
template <bool kEdge, bool kPlain, typename Acc>
__device__ __forceinline__ void scores_to_probs(Acc& s, const BwdHead<kPlain>& h,
                                                const RowValues& rows, int first_row,
                                                int first_key) {
  float shift[Acc::kColsPerThread];
  Acc::load_columns(shift, rows.shift);
  bool large = false;
#pragma unroll
  for (int c = 0; c < Acc::kColsPerThread; ++c) large |= shift[c] == kLargeRow;
  if (warp_any(large)) settle_large(s, shift, rows.large_anchor, rows.large_shift);
  Acc::for_each_place([&](const typename Acc::Place& at) {
    const float p = exp2_approx(s(at) * h.exp_scale - shift[at.col_slot]);
    const int i = first_row + at.col, j = first_key + Acc::row(at.slot);
    s(at) = !kEdge || h.mask.sees(i, j) ? p : 0.f;
  });
}

// s: scores' products -> P after dropout. dp: dP -> d loss / d product, without softmax_scale. In
// between every d loss / d score goes to each_dscore(place, ds), where `listens`.
template <bool kEdge, bool kDropout, bool kPlain, typename Acc, typename F>
__device__ __forceinline__ void tile_grads(Acc& s, Acc& dp, const BwdHead<kPlain>& h,
                                           const RowValues& rows, int first_row, int first_key,
                                           bool listens, F each_dscore) {
  Acc products;  // only where the score bends, and its derivative will ask for them
  if (!kPlain && !h.score.modifiers.is_linear()) products = s;
  h.template apply_score<kEdge>(s, first_row, first_key);
  scores_to_probs<kEdge>(s, h, rows, first_row, first_key);
  float delta[Acc::kColsPerThread];
  Acc::load_columns(delta, rows.delta);
  // Masked scores have no gradient, whatever V held there.
  const auto dscore = [&](const typename Acc::Place& at, float grad) {
    const float ds = s(at) * (grad - delta[at.col_slot]);
    return kEdge && s(at) == 0.f ? 0.f : ds;
  };
  if (kDropout) {
    for_each_dropout<Acc>(h.dropout, h.batch, h.head, first_row, first_key,
                          [&](const typename Acc::Place& at, float factor) {
                            dp(at) = dscore(at, dp(at) * factor);
                            s(at) *= factor;
                          });
  } else {
    Acc::for_each_place([&](const typename Acc::Place& at) { dp(at) = dscore(at, dp(at)); });
  }
  if (kPlain) return;
  if (listens) {
    Acc::for_each_place([&](const typename Acc::Place& at) { each_dscore(at, dp(at)); });
  }
  if (!h.score.modifiers.is_linear()) {
    Acc::for_each_place([&](const typename Acc::Place& at) {
      dp(at) *= h.score.modifiers.grad(products(at) * h.score.scale, first_row + at.col,
                                       first_key + Acc::row(at.slot));
    });
  }
}

}  // namespace flash::cuda
