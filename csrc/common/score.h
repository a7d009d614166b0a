// What happens to a score between the product q.k and the softmax.
//
// A modifier has apply(s, i, j) and grad(s, i, j) = d apply / d s side by side, so that forward and
// backward cannot drift apart; is_on(), uniform over the launch; is_linear(), whether grad is 1 for
// every score of the launch; and with_active(pre, f), which
// calls f with the function s -> apply(pre s) of a modifier that is on. A Chain applies them in
// list order: one score at a time (apply, grad), or one modifier after the other over a whole tile
// (for_each_active), where a GPU asks is_on once a tile and not once a score. Adding a modifier is
// one struct here and one name in the list of Score.
#pragma once

#include <math.h>

#include <cstdint>

#include "exp_log.h"
#include "number.h"

namespace flash {

// cap tanh(s / cap); off when cap is 0.
template <typename T>
struct Softcap {
  T cap;
  T inverse;  // 1 / cap: a division for every score would cost more than the tanh
  FLASH_HD bool is_on() const { return cap > 0; }
  FLASH_HD bool is_linear() const { return !is_on(); }
  FLASH_HD T apply(T s, int, int) const { return is_on() ? cap * tanh_of(s * inverse) : s; }
  FLASH_HD T grad(T s, int, int) const {
    if (!is_on()) return T(1);
    const T t = tanh_of(s * inverse);
    return T(1) - t * t;
  }
  template <typename F>
  FLASH_HD void with_active(T pre, F f) const {
    f([c = cap, factor = inverse * pre](T s, int, int)
          FLASH_HD_LAMBDA { return c * tanh_of(s * factor); });
  }
};

// A (row, key) matrix that is added, or a bool mask (true = take part).
struct BiasMatrix {
  const void* data;    // already at this sequence and head; null: none
  int64_t row_stride;  // elements; 0 when broadcast
  int64_t key_stride;
  DType dtype;
};

// One element as T. Finite numbers are clamped to >= -1e38, so that finfo.min of any type adds up
// without overflow; -inf stays -inf and masks. A bool is 0 or -inf.
template <typename T, DType kDtype>
FLASH_HD T load_bias(const void* data, int64_t at) {
  T x;
  if constexpr (kDtype == DType::kBool)
    return static_cast<const uint8_t*>(data)[at] ? T(0) : T(-INFINITY);
  else if constexpr (kDtype == DType::kFloat16)
    x = T(float16_to_float(static_cast<const uint16_t*>(data)[at]));
  else if constexpr (kDtype == DType::kBFloat16)
    x = T(bfloat16_to_float(static_cast<const uint16_t*>(data)[at]));
  else if constexpr (kDtype == DType::kFloat32)
    x = T(static_cast<const float*>(data)[at]);
  else
    x = T(static_cast<const double*>(data)[at]);
  return x < T(-1e38) && x > T(-INFINITY) ? T(-1e38) : x;
}

template <typename T>
struct Bias {
  BiasMatrix matrix;

  FLASH_HD bool is_on() const { return matrix.data != nullptr; }
  FLASH_HD bool is_linear() const { return true; }
  FLASH_HD T apply(T s, int i, int j) const {
    if (is_on()) with_active(T(1), [&](auto add) FLASH_HD_LAMBDA { s = add(s, i, j); });
    return s;
  }
  FLASH_HD T grad(T, int, int) const { return T(1); }

  // The element type is asked for once, not once a score.
  template <typename F>
  FLASH_HD void with_active(T pre, F f) const {
    switch (matrix.dtype) {
      case DType::kBool:
        return f(adder<DType::kBool>(pre));
      case DType::kFloat16:
        return f(adder<DType::kFloat16>(pre));
      case DType::kBFloat16:
        return f(adder<DType::kBFloat16>(pre));
      case DType::kFloat32:
        return f(adder<DType::kFloat32>(pre));
      default:  // float64 comes with float64 inputs only
        if constexpr (sizeof(T) == 8) f(adder<DType::kFloat64>(pre));
    }
  }

 private:
  template <DType kDtype>
  FLASH_HD auto adder(T pre) const {
    return [m = matrix, pre](T s, int i, int j) FLASH_HD_LAMBDA {
      const T b = load_bias<T, kDtype>(m.data, i * m.row_stride + j * m.key_stride);
      return b == T(-INFINITY) ? b : s * pre + b;  // NaN - inf would be NaN: masked is masked
    };
  }
};

// s - slope |i + seqlen_k - seqlen_q - j| (Press et al., "Train Short, Test Long", ICLR 2022).
template <typename T>
struct Alibi {
  T slope;  // 0: off
  int diagonal;
  FLASH_HD bool is_on() const { return slope != T(0); }
  FLASH_HD bool is_linear() const { return true; }
  // Converted apart, so that a tile loop does it once a row and once a key; exact below 2^24.
  FLASH_HD T distance(int i, int j) const {
    const T d = static_cast<T>(i + diagonal) - static_cast<T>(j);
    return d < 0 ? -d : d;
  }
  FLASH_HD T apply(T s, int i, int j) const { return is_on() ? s - slope * distance(i, j) : s; }
  FLASH_HD T grad(T, int, int) const { return T(1); }
  template <typename F>
  FLASH_HD void with_active(T pre, F f) const {
    f([m = *this, pre](T s, int i, int j)
          FLASH_HD_LAMBDA { return s * pre - m.slope * m.distance(i, j); });
  }
};

template <typename T, typename... Modifiers>
struct Chain;

template <typename T>
struct Chain<T> {
  FLASH_HD bool is_linear() const { return true; }
  FLASH_HD T apply(T s, int, int) const { return s; }
  FLASH_HD T grad(T, int, int) const { return T(1); }
  template <typename F>
  FLASH_HD void for_each_active(T pre, F f) const {
    if (pre != T(1)) f([pre](T s, int, int) FLASH_HD_LAMBDA { return s * pre; });
  }
};

template <typename T, typename First, typename... Rest>
struct Chain<T, First, Rest...> {
  First first;
  Chain<T, Rest...> rest;
  FLASH_HD bool is_linear() const { return first.is_linear() && rest.is_linear(); }
  FLASH_HD T apply(T s, int i, int j) const { return rest.apply(first.apply(s, i, j), i, j); }
  FLASH_HD T grad(T s, int i, int j) const {
    return first.grad(s, i, j) * rest.grad(first.apply(s, i, j), i, j);
  }
  // The factor `pre` goes to the first modifier that is on.
  template <typename F>
  FLASH_HD void for_each_active(T pre, F f) const {
    if (first.is_on()) first.with_active(pre, f);
    rest.for_each_active(first.is_on() ? T(1) : pre, f);
  }
};

// softmax_scale <q_i, k_j>, then the modifiers in the order of semantics.md, for every combination.
template <typename T>
struct Score {
  T scale;
  Chain<T, Softcap<T>, Bias<T>, Alibi<T>> modifiers;

  FLASH_HD T apply(T dot, int i, int j) const { return modifiers.apply(dot * scale, i, j); }
  FLASH_HD T grad(T dot, int i, int j) const { return scale * modifiers.grad(dot * scale, i, j); }
  // f(function of (s, i, j)), in order, for a whole tile of products.
  template <typename F>
  FLASH_HD void for_each_active(F f) const {
    modifiers.for_each_active(scale, f);
  }
};

template <typename T>
FLASH_HD Score<T> make_score(T scale, T softcap, BiasMatrix bias, T slope, int diagonal) {
  const Softcap<T> cap = {softcap, softcap > 0 ? 1 / softcap : 0};
  return {scale, {cap, {{bias}, {{slope, diagonal}, {}}}}};
}

}  // namespace flash
