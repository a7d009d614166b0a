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

template <typename T, int kBytes = kVecBytes>
struct VecOf {
  typedef T type __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = kBytes / sizeof(T);
};
template <typename T>
using Vec = typename VecOf<T>::type;
typedef uint32_t VecInt __attribute__((vector_size(kVecBytes)));

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

// The lanes of v joined by op(a, b), in halves: op takes vectors of every width and numbers.
template <typename T, int kBytes = kVecBytes, typename Op>
FLASH_HD T fold(typename VecOf<T, kBytes>::type v, Op op) {
  if constexpr (kBytes == 2 * sizeof(T)) {
    return op(v[0], v[1]);
  } else {
    typename VecOf<T, kBytes / 2>::type low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return fold<T, kBytes / 2>(op(low, high), op);
  }
}

// exp of kExpVecs vectors in place, step by step for all of them: the steps of one wait for each
// other longer than the processor looks ahead (one at a time takes 1.3 times as long with AVX2, 1.5
// times with 16-byte vectors).
constexpr int kExpVecs = 4;
template <typename T>
using ExpVecs = Vec<T>[kExpVecs];

// Relative error below 2e-7: 2^n times a degree 6 polynomial on |r| <= ln(2) / 2. exp(-inf) = 0,
// exp of less than -87.3 flushes to 0, more than 88.37 is Inf, NaN stays NaN. What is computed
// outside of these two means nothing and is replaced at the end.
FLASH_HD void vec_exp(ExpVecs<float>& x) {
  constexpr float kLow = -87.33f, kHigh = 88.37f;
  constexpr float kPolynomial[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                   1.6666665459e-1f, 5.0000001201e-1f};
  const Vec<float> magic = splat(12582912.f);  // 1.5 * 2^23: the sum's low bits are round(x log2 e)
  ExpVecs<float> shifted, r, p;
  for (int i = 0; i < kExpVecs; ++i) shifted[i] = x[i] * 1.44269504088896341f + magic;
  for (int i = 0; i < kExpVecs; ++i) r[i] = x[i] - (shifted[i] - magic) * 0.693359375f;
  for (int i = 0; i < kExpVecs; ++i) r[i] = r[i] + (shifted[i] - magic) * 2.12194440e-4f;
  for (int i = 0; i < kExpVecs; ++i) p[i] = splat(1.9875691500e-4f);
  for (float coefficient : kPolynomial)
    for (int i = 0; i < kExpVecs; ++i) p[i] = p[i] * r[i] + coefficient;
  for (int i = 0; i < kExpVecs; ++i) p[i] = p[i] * (r[i] * r[i]) + r[i] + 1.0f;
  for (int i = 0; i < kExpVecs; ++i) {
    VecInt exponent;
    memcpy(&exponent, &shifted[i], sizeof exponent);
    exponent = (exponent - 0x4B400000 + 127) << 23;
    Vec<float> scale;
    memcpy(&scale, &exponent, sizeof scale);
    const Vec<float> y = x[i] < kLow ? Vec<float>{} : p[i] * scale;
    x[i] = x[i] > kHigh ? splat(INFINITY) : y;
  }
}

FLASH_HD void vec_exp(ExpVecs<double>& x) {
  for (Vec<double>& v : x)
    for (int i = 0; i < VecOf<double>::kLanes; ++i) v[i] = exp_of(v[i]);
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
