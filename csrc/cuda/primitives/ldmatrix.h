// ldmatrix (sm75 and later): four 8 x 8 matrices of 16-bit elements from shared memory. Lane l
// gives the address of row l % 8 of matrix l / 8; lane l receives elements 2 (l % 4), 2 (l % 4) + 1
// of row l / 4 of each matrix (of each transposed matrix with .trans).
#pragma once

#include <cstdint>

namespace flash::cuda {

// volatile keeps the order against barriers, which the compiler cannot see the reason for.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address));
}

}  // namespace flash::cuda
