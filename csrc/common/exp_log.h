// exp, log and tanh for the types that sums are kept in.
//
// The double forms go through long double: exp and log of double carry a glibc 2.29 version, which
// would keep a wheel from systems with 2.28 (manylinux_2_28). Only float64 inputs, which serve
// gradient checks, ever call them.
#pragma once

#include <math.h>

#include "host_device.h"

namespace flash {

FLASH_HD float exp_of(float x) { return expf(x); }
FLASH_HD float log_of(float x) { return logf(x); }
FLASH_HD double exp_of(double x) { return static_cast<double>(expl(x)); }
FLASH_HD double log_of(double x) { return static_cast<double>(logl(x)); }

// tanh to about 1e-6 of its range. On a GPU by two special-function instructions instead of the
// library's branches: a softcap costs one for every score.
FLASH_HD float tanh_of(float x) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  return 1.f - __fdividef(2.f, 1.f + __expf(2.f * x));  // exp overflows to inf: 1; underflows: -1
#else
  return tanhf(x);
#endif
}
FLASH_HD double tanh_of(double x) { return tanh(x); }

}  // namespace flash
