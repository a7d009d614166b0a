// The one macro that lets this folder serve CUDA, HIP and plain C++.
//
// On the CPU every function is forced inline: the same header is compiled for several instruction
// sets into one library, and an out-of-line copy built for AVX-512 must never be the one that the
// linker keeps for a machine without it.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FLASH_HD __host__ __device__ __forceinline__
#define FLASH_HD_LAMBDA
#else
#define FLASH_HD inline __attribute__((always_inline))
#define FLASH_HD_LAMBDA __attribute__((always_inline))  // after a lambda's parameters
#endif

namespace flash {

template <typename T>
FLASH_HD T min_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
FLASH_HD T max_of(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
FLASH_HD T clamp_to(T x, T low, T high) {
  return min_of(max_of(x, low), high);
}

template <typename T>
FLASH_HD T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace flash
