// cvt (sm80 and later): two floats to one register of 16-bit elements, and one element to a float.
#pragma once

#include <cstdint>

#include "../../common/number.h"

namespace flash::cuda {

// Two floats to one register, `low` in the low half; round to nearest even.
template <typename In>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack2<float16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <typename In>
__device__ __forceinline__ float to_float(uint16_t bits);

template <>
__device__ __forceinline__ float to_float<bfloat16>(uint16_t bits) {
  return bfloat16_to_float(bits);
}

template <>
__device__ __forceinline__ float to_float<float16>(uint16_t bits) {
  return float16_to_float(bits);
}

}  // namespace flash::cuda
