// Element types, and 16-bit floats as bits: conversions that need no vendor header and vectorise on
// the host.
#pragma once

#include <string.h>

#include <cstdint>

#include "host_device.h"

namespace flash {

enum class DType : int { kNone, kBool, kFloat16, kBFloat16, kFloat32, kFloat64 };

// Bytes of one element.
FLASH_HD int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    default:
      return 0;
  }
}

// 16-bit floats in memory.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

FLASH_HD float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FLASH_HD uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FLASH_HD float bfloat16_to_float(uint16_t bits) {
  return bits_to_float(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; NaN stays NaN.
FLASH_HD uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

FLASH_HD float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(bits & 0x7FFFu) << 13;
  const uint32_t exponent = bits & 0x7C00u;
  const uint32_t normal = body + 0x38000000u;   // exponent bias 15 -> 127
  const uint32_t special = body | 0x7F800000u;  // Inf and NaN keep their mantissa
  const float tiny = static_cast<float>(static_cast<int>(bits & 0x3FFu)) * 5.9604644775390625e-8f;
  const uint32_t finite = exponent == 0 ? float_to_bits(tiny) : normal;
  return bits_to_float(sign | (exponent == 0x7C00u ? special : finite));
}

// Round to nearest even; values beyond 65519 become Inf, NaN stays NaN.
FLASH_HD uint16_t float_to_float16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t body = bits & 0x7FFFFFFFu;
  // Below 2^-14 the result is subnormal: adding 0.5 lets the float unit round to its last bit.
  const uint32_t subnormal = float_to_bits(bits_to_float(body) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (body + 0xC8000FFFu + ((body >> 13) & 1u)) >> 13;
  const uint32_t special = body > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t finite = body < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(sign | (body >= 0x477FF000u ? special : finite));
}

// Element `at` of floats of any type.
template <typename T>
FLASH_HD T load_number(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat16:
      return T(float16_to_float(static_cast<const uint16_t*>(data)[at]));
    case DType::kBFloat16:
      return T(bfloat16_to_float(static_cast<const uint16_t*>(data)[at]));
    case DType::kFloat32:
      return T(static_cast<const float*>(data)[at]);
    default:
      return T(static_cast<const double*>(data)[at]);
  }
}

}  // namespace flash
