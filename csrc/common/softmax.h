// Online softmax of one row (Milakov and Gimelshein, 2018; FlashAttention-2, section 3.1): the
// running maximum m and the running sum l of exp(s - m), and what the end of the row makes of them.
#pragma once

#include "exp_log.h"

#include "host_device.h"

namespace flash {

// What earlier terms are multiplied by when the maximum moves from m_old to m_new; 1 while both are
// -inf.
template <typename T>
FLASH_HD T rescale_factor(T m_old, T m_new) {
  return m_old == m_new ? T(1) : exp_of(m_old - m_new);
}

template <typename T>
struct RowEnd {
  T lse;        // log of the sum, natural; -inf when the row saw nothing and has no sink
  T out_scale;  // the accumulated sum of exp(s - m) v times this is the output
};

// Closes a row; `sink` is one more logit that takes part in the sum and has no value (-inf: none).
template <typename T>
FLASH_HD RowEnd<T> finish_row(T m, T l, T sink) {
  const T m_end = m < sink ? sink : m;  // a NaN maximum stays
  if (l != l) return {l, l};            // a maximum may have lost a NaN, the sum has not
  if (m_end == T(-INFINITY)) return {T(-INFINITY), T(0)};
  const T factor = rescale_factor(m, m_end);
  const T sum = l * factor + exp_of(sink - m_end);
  return {m_end + log_of(sum), factor / sum};
}

// exp(s - lse) needs an lse that keeps its digits: at |lse| = 1e5 a float lse has lost log(n)'s
// third decimal, at 1e38 (a row of finfo.min biases) all of it. From here on the backward
// normalises a row anew instead of trusting lse alone.
constexpr float kLargeLse = 256.f;

template <typename T>
FLASH_HD bool needs_renormalising(T lse) {
  return fabs(lse) >= T(kLargeLse) && fabs(lse) < T(INFINITY);
}

}  // namespace flash
