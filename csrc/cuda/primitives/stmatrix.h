// stmatrix (sm90): four 8 x 8 matrices of 16-bit elements to shared memory, the inverse of
// ldmatrix.
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ void stmatrix_x4(uint32_t smem_address, uint32_t r0, uint32_t r1,
                                            uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace flash::cuda
