// exp and log for the types that sums are kept in.
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

}  // namespace flash
