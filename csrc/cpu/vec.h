// Vectors in the compiler's own notation: one source for SSE2, AVX2, AVX-512 and NEON.
#pragma once

#include <string.h>
#include "../common/exp_log.h"

#include <cstdint>

#include "number.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

template <typename T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVecBytes)));
  static constexpr int kLanes = kVecBytes / sizeof(T);
};
template <typename T>
using Vec = typename VecOf<T>::type;
typedef int32_t VecInt __attribute__((vector_size(kVecBytes)));

template <typename T>
FLASH_HD Vec<T> load(const T* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
FLASH_HD void store(T* p, Vec<T> v) {
  memcpy(p, &v, sizeof v);
}
template <typename T>
FLASH_HD Vec<T> splat(T x) {
  return x - Vec<T>{};  // one broadcast; x - 0 keeps -0, Inf and NaN
}

// exp for float, relative error below 2e-7: 2^n times a degree 6 polynomial on |r| <= ln(2) / 2.
// exp(-inf) = 0, exp of less than -87.3 flushes to 0, more than 88.37 is Inf, NaN stays NaN.
FLASH_HD Vec<float> vec_exp(Vec<float> x) {
  constexpr float kLow = -87.33f, kHigh = 88.37f;
  Vec<float> y = x < kLow ? splat(kLow) : x;
  y = y > kHigh ? splat(kHigh) : y;
  const Vec<float> magic = splat(12582912.f);  // 1.5 * 2^23: the sum's low bits are round(y log2 e)
  const Vec<float> shifted = y * 1.44269504088896341f + magic;
  const Vec<float> n = shifted - magic;
  Vec<float> r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  VecInt exponent;
  memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4B400000 + 127) << 23;
  Vec<float> scale;
  memcpy(&scale, &exponent, sizeof scale);
  p = p * scale;
  p = x < kLow ? Vec<float>{} : p;
  return x > kHigh ? splat(INFINITY) : p;
}

FLASH_HD Vec<double> vec_exp(Vec<double> x) {
  Vec<double> y;
  for (int i = 0; i < VecOf<double>::kLanes; ++i) y[i] = exp_of(x[i]);
  return y;
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
