// ex2 (every architecture): powers of two by the special-function unit.
#pragma once

namespace flash::cuda {

constexpr float kLog2e = 1.4426950408889634f;

// 2^x, relative error 2^-22; 0 for -inf, results below 2^-126 flush to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash::cuda
