// The scalar types of the CPU kernels and what their sums are kept in.
//
// Every header of this folder is compiled once an instruction set, inside an inline namespace of
// that name, so that no two builds of one function meet in the linker.
#pragma once

#include "../common/number.h"

namespace flash::cpu {

inline namespace FLASH_CPU_ISA {

template <typename In>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename In>
using Acc = typename AccOf<In>::type;

FLASH_HD float to_acc(float x) { return x; }
FLASH_HD double to_acc(double x) { return x; }
FLASH_HD float to_acc(bfloat16 x) { return bfloat16_to_float(x.bits); }
FLASH_HD float to_acc(float16 x) { return float16_to_float(x.bits); }

template <typename In>
FLASH_HD In from_acc(Acc<In> x);
template <>
FLASH_HD float from_acc<float>(float x) {
  return x;
}
template <>
FLASH_HD double from_acc<double>(double x) {
  return x;
}
template <>
FLASH_HD bfloat16 from_acc<bfloat16>(float x) {
  return {float_to_bfloat16(x)};
}
template <>
FLASH_HD float16 from_acc<float16>(float x) {
  return {float_to_float16(x)};
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
