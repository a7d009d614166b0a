// Which instruction sets this processor has; asked once a look-up, answered from cpuid.
#pragma once

#include "../common/host_device.h"

namespace flash::cpu {

FLASH_HD bool runs_generic() { return true; }

#if defined(__x86_64__)
FLASH_HD bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
FLASH_HD bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace flash::cpu
