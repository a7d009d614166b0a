// Online softmax over the score tiles of a warp: the rows' maxima and sums, in registers.
#pragma once

#include "../../common/softmax.h"

#include <config.h>
#include <fragment.h>

namespace flash::cuda {

// AccS holds a tile's scores and AccO the rows' output; their slots stand for the same rows.
template <typename AccS, typename AccO, Rescale kRescale>
struct OnlineRows {
  static constexpr int kSlots = AccO::kRowsPerThread;
  static constexpr float kHuge = 1e9f;
  static constexpr bool kSubtractFirst = kRescale == Rescale::kAlways;

  float row_max[kSlots];
  float row_lost[kSlots];  // what row_sum's additions rounded up, see add_to_row
  float row_sum[kSlots];   // this thread's share; joined at the end
  float exp_scale;         // from the unit of row_max to powers of two

  __device__ __forceinline__ void start(float exp_scale_) {
    exp_scale = exp_scale_;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      row_max[slot] = -INFINITY;
      row_sum[slot] = 0.f;
      row_lost[slot] = 0.f;
    }
  }

  // s becomes p = exp(s - row_max) in powers of two. Sum and output follow the maximum where it
  // moved; with Rescale::kWhenMoved a warp whose rows all kept theirs skips the product with O.
  __device__ __forceinline__ void update(AccS& acc_s, AccO& acc_o) {
    float m_new[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) m_new[slot] = row_max[slot];
    acc_s.for_each([&](float s, int slot, int) { m_new[slot] = fmaxf(m_new[slot], s); });
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      m_new[slot] = AccS::reduce_row(m_new[slot], [](float a, float b) { return fmaxf(a, b); });
      moved |= m_new[slot] != row_max[slot];
    }
    if (kSubtractFirst || warp_any(moved)) rescale(m_new, acc_o);
    if (!kSubtractFirst) settle_huge(acc_s);
    float shift[kSlots];  // what is subtracted; 0 where nothing was seen, for s - m would be NaN
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (kSubtractFirst)
        shift[slot] = row_max[slot] == -INFINITY ? 0.f : row_max[slot];
      else
        shift[slot] = fabsf(row_max[slot]) > kHuge ? 0.f : row_max[slot] * exp_scale;
    }
    float tile_sum[kSlots] = {};
    acc_s.for_each([&](float& s, int slot, int) {
      s = exp2_approx(kSubtractFirst ? (s - shift[slot]) * exp_scale : s * exp_scale - shift[slot]);
      tile_sum[slot] += s;
    });
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) add_to_row(slot, tile_sum[slot]);
  }

  // The sum of a row over the lanes that share it.
  __device__ __forceinline__ float total(int slot) const {
    return AccO::reduce_row(row_sum[slot], [](float a, float b) { return a + b; });
  }

 private:
  // Kahan's sum, once a tile: over millions of keys of like weight the roundings of a plain float
  // sum all go the same way (4M keys: 1 % of the sum).
  __device__ __forceinline__ void add_to_row(int slot, float x) {
    const float y = x - row_lost[slot];
    const float sum = row_sum[slot] + y;
    row_lost[slot] = (sum - row_sum[slot]) - y;
    row_sum[slot] = sum;
  }

  // The one multiply-add above rounds row_max * exp_scale. Where a row's maximum is beyond kHuge (a
  // row of finfo.min biases, products of huge q and k), that rounding alone is more than any
  // exponential: subtract first there. A step that is scheduled as one piece has no room for the
  // branch and always subtracts first.
  __device__ __forceinline__ void settle_huge(AccS& acc_s) {
    bool huge = false;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      huge |= fabsf(row_max[slot]) > kHuge && row_max[slot] != -INFINITY;
    if (!warp_any(huge)) return;
    acc_s.for_each([&](float& s, int slot, int) {
      if (fabsf(row_max[slot]) > kHuge && row_max[slot] != -INFINITY) s -= row_max[slot];
    });
  }

  __device__ __forceinline__ void rescale(const float (&m_new)[kSlots], AccO& acc_o) {
    float factor[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      factor[slot] = m_new[slot] == row_max[slot]
                         ? 1.f
                         : exp2_approx((row_max[slot] - m_new[slot]) * exp_scale);
      row_max[slot] = m_new[slot];
      row_sum[slot] *= factor[slot];
      row_lost[slot] *= factor[slot];
    }
    acc_o.for_each([&](float& o, int slot, int) { o *= factor[slot]; });
  }
};

}  // namespace flash::cuda
