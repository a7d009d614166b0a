// What happens to a score between the product q.k and the softmax.
//
// Each modifier has apply(s, i, j) and grad(s, i, j) = d apply / d s side by side, so that forward
// and backward cannot drift apart. A Chain applies them in list order; the backward walks the same
// list. Adding a modifier is one struct here and one name in the list of Score.
#pragma once

#include <math.h>
#include <cstdint>

#include "number.h"

namespace flash {

// softmax_scale <q_i, k_j>
template <typename T>
struct Scale {
  T scale;
  FLASH_HD T apply(T s, int, int) const { return s * scale; }
  FLASH_HD T grad(T, int, int) const { return scale; }
};

// cap tanh(s / cap); off when cap is 0.
template <typename T>
struct Softcap {
  T cap;
  FLASH_HD T apply(T s, int, int) const { return cap > 0 ? cap * tanh(s / cap) : s; }
  FLASH_HD T grad(T s, int, int) const {
    if (!(cap > 0)) return T(1);
    const T t = tanh(s / cap);
    return T(1) - t * t;
  }
};

// A (row, key) matrix that is added, or a bool mask (true = take part).
struct BiasMatrix {
  const void* data;    // already at this sequence and head; null: none
  int64_t row_stride;  // elements; 0 when broadcast
  int64_t key_stride;
  DType dtype;
};

template <typename T>
struct Bias {
  BiasMatrix matrix;

  // Finite numbers are clamped to >= -1e38, so that finfo.min of any type adds up without
  // overflow; -inf stays -inf and masks.
  static FLASH_HD T clamp(T x) { return x < T(-1e38) && x > T(-INFINITY) ? T(-1e38) : x; }

  FLASH_HD T value(int i, int j) const {
    const int64_t at = i * matrix.row_stride + j * matrix.key_stride;
    switch (matrix.dtype) {
      case DType::kBool:
        return static_cast<const uint8_t*>(matrix.data)[at] ? T(0) : T(-INFINITY);
      case DType::kFloat16:
        return clamp(T(float16_to_float(static_cast<const uint16_t*>(matrix.data)[at])));
      case DType::kBFloat16:
        return clamp(T(bfloat16_to_float(static_cast<const uint16_t*>(matrix.data)[at])));
      case DType::kFloat32:
        return clamp(T(static_cast<const float*>(matrix.data)[at]));
      case DType::kFloat64:
        return clamp(T(static_cast<const double*>(matrix.data)[at]));
      default:
        return T(0);
    }
  }
  FLASH_HD T apply(T s, int i, int j) const {
    if (!matrix.data) return s;
    const T b = value(i, j);
    return b == T(-INFINITY) ? b : s + b;  // NaN - inf would be NaN: a masked key is masked
  }
  FLASH_HD T grad(T, int, int) const { return T(1); }
};

// s - slope |i + seqlen_k - seqlen_q - j| (Press et al., "Train Short, Test Long", ICLR 2022).
template <typename T>
struct Alibi {
  T slope;  // 0: off
  int diagonal;
  FLASH_HD T distance(int i, int j) const {
    const int d = i + diagonal - j;
    return static_cast<T>(d < 0 ? -d : d);
  }
  FLASH_HD T apply(T s, int i, int j) const {
    return slope == T(0) ? s : s - slope * distance(i, j);
  }
  FLASH_HD T grad(T, int, int) const { return T(1); }
};

template <typename T, typename... Modifiers>
struct Chain;

template <typename T>
struct Chain<T> {
  FLASH_HD T apply(T s, int, int) const { return s; }
  FLASH_HD T grad(T, int, int) const { return T(1); }
};

template <typename T, typename First, typename... Rest>
struct Chain<T, First, Rest...> {
  First first;
  Chain<T, Rest...> rest;
  FLASH_HD T apply(T s, int i, int j) const { return rest.apply(first.apply(s, i, j), i, j); }
  FLASH_HD T grad(T s, int i, int j) const {
    return first.grad(s, i, j) * rest.grad(first.apply(s, i, j), i, j);
  }
};

// The order of semantics.md, for every combination.
template <typename T>
using Score = Chain<T, Scale<T>, Softcap<T>, Bias<T>, Alibi<T>>;

template <typename T>
FLASH_HD Score<T> make_score(T scale, T softcap, BiasMatrix bias, T slope, int diagonal) {
  return {{scale}, {{softcap}, {{bias}, {{slope, diagonal}, {}}}}};
}

}  // namespace flash
