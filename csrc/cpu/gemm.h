// The one product of the CPU kernels: C (+)= A B on tiles that live in a thread's scratch.
//
// B and C are row-major with padded rows; A may lie either way, so P^T and dS^T need no transpose.
// A block of C stays in registers over the whole of k and joins what was there at the end: a sum
// over many tiles is a sum of tile sums, which rounds less than one long chain.
#pragma once

#include "vec.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

enum class Into { kOverwrite, kAdd };

// Rows of scratch tiles are padded to this many elements (a multiple of the widest register tile)
// and tiles to kRowPad rows; pads hold finite values.
constexpr int kColPad = 32;
constexpr int kRowPad = 4;

FLASH_HD int pad_cols(int n) { return ceil_div(n, kColPad) * kColPad; }

// A (m, k): element (m, k) is data[m * row + k * col].
template <typename T>
struct Operand {
  const T* data;
  int row;
  int col;
};

// kRowPad rows by two vectors of C.
template <typename T>
FLASH_HD void gemm_block(int k_size, Operand<T> a, const T* b, int ldb, T* c, int ldc, Into into) {
  constexpr int kLanes = VecOf<T>::kLanes;
  Vec<T> sum[kRowPad][2] = {};
  for (int k = 0; k < k_size; ++k) {
    const Vec<T> b0 = load(b + k * ldb);
    const Vec<T> b1 = load(b + k * ldb + kLanes);
    for (int m = 0; m < kRowPad; ++m) {
      const T x = a.data[m * a.row + k * a.col];
      sum[m][0] += x * b0;
      sum[m][1] += x * b1;
    }
  }
  for (int m = 0; m < kRowPad; ++m)
    for (int half = 0; half < 2; ++half) {
      T* target = c + m * ldc + half * kLanes;
      store(target, into == Into::kAdd ? load(target) + sum[m][half] : sum[m][half]);
    }
}

// C (m, n) (+)= sum over k of A (m, k) B (k, n). C has a multiple of kRowPad rows, B and C
// pad_cols(n) columns; the pads of C receive products of pads.
template <typename T>
inline void gemm(int m_size, int n_size, int k_size, Operand<T> a, const T* b, int ldb, T* c,
                 int ldc, Into into) {
  constexpr int kStep = 2 * VecOf<T>::kLanes;
  for (int n = 0; n < n_size; n += kStep) {
    for (int m = 0; m < m_size; m += kRowPad) {
      const Operand<T> rows = {a.data + m * a.row, a.row, a.col};
      gemm_block(k_size, rows, b + n, ldb, c + m * ldc + n, ldc, into);
    }
  }
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
