// Rotary position embedding (Su et al., "RoFormer", 2021): pairs of a head's elements are turned by
// an angle that grows with the position.
//
// The first 2 half elements of a head take part: pair c is (2 c, 2 c + 1) when interleaved (GPT-J),
// else (c, c + half) (GPT-NeoX). The rest of the head passes as it is, in pairs of neighbours, so
// that one loop over pairs covers a row.
#pragma once

#include "number.h"

namespace flash {

struct Rotary {
  const void* cos = nullptr;  // (rows, half), like sin; null: no rotation
  const void* sin = nullptr;
  int64_t cos_stride = 0;  // between rows; the element stride is 1
  int64_t sin_stride = 0;
  DType dtype = DType::kNone;  // of cos and sin
  int rows = 0;                // positions that the tables hold
  int half = 0;
  bool interleaved = false;
  bool conjugate = false;  // turns back: the gradient

  struct Pair {
    int first, second;  // second may be past the end of an odd head
    bool turns;
  };

  static FLASH_HD int pairs(int dim) { return ceil_div(dim, 2); }
  FLASH_HD Pair pair(int c) const {
    if (cos && c < half && !interleaved) return {c, c + half, true};
    return {2 * c, 2 * c + 1, cos && c < half};
  }

  // Turns pair c of a row; positions past the tables stay at their last one.
  template <typename T>
  FLASH_HD void turn(T& a, T& b, int64_t position, int c) const {
    const int64_t row = clamp_to<int64_t>(position, 0, rows - 1);
    const T x = load_number<T>(cos, dtype, row * cos_stride + c);
    const T y = load_number<T>(sin, dtype, row * sin_stride + c) * (conjugate ? T(-1) : T(1));
    const T turned = a * x - b * y;
    b = a * y + b * x;
    a = turned;
  }
};

}  // namespace flash
