// The one product of the CPU kernels: C (+)= A B on tiles that live in a thread's scratch.
//
// B and C are row-major with padded rows; A may lie either way, so P^T and dS^T need no transpose.
// A block of C stays in registers over the whole of k and joins what was there at the end: a sum
// over many tiles is a sum of tile sums, which rounds less than one long chain.
#pragma once

#include <type_traits>

#include "vec.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

enum class Into { kOverwrite, kAdd };

// Rows of scratch tiles are padded to this many elements (a multiple of the widest register tile)
// and tiles to kRowPad rows; pads hold finite values.
constexpr int kColPad = 32;
constexpr int kRowPad = 4;

FLASH_HD int pad_cols(int n) { return ceil_div(n, kColPad) * kColPad; }

template <int kRows>
using Rows = std::integral_constant<int, kRows>;

// A (m, k): element (m, k) is data[m * row + k * col].
template <typename T>
struct Operand {
  const T* data;
  int row;
  int col;
};

// Rows of a register tile. With AVX2's 16 registers 6 x 2 accumulators, two vectors of B and one
// of A fill all but one, and 12 products in flight hide the latency of 4 cycles on two ports; 4 x 2
// just do, and lose 15 %.
constexpr int kTileRows = kVecBytes == 32 ? 6 : kRowPad;

// kRows rows by two vectors of C.
template <int kRows, typename T>
FLASH_HD void gemm_block(int k_size, Operand<T> a, const T* b, int ldb, T* c, int ldc, Into into) {
  constexpr int kLanes = VecOf<T>::kLanes;
  Vec<T> sum[kRows][2] = {};
  for (int k = 0; k < k_size; ++k) {
    const Vec<T> b0 = load(b + k * ldb);
    const Vec<T> b1 = load(b + k * ldb + kLanes);
    for (int m = 0; m < kRows; ++m) {
      const T x = a.data[m * a.row + k * a.col];
      sum[m][0] += x * b0;
      sum[m][1] += x * b1;
    }
  }
  for (int m = 0; m < kRows; ++m)
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
  const int m_end = ceil_div(m_size, kRowPad) * kRowPad;
  for (int n = 0; n < n_size; n += kStep) {
    const auto block = [&](auto rows, int m) FLASH_HD_LAMBDA {
      const Operand<T> from = {a.data + m * a.row, a.row, a.col};
      gemm_block<rows()>(k_size, from, b + n, ldb, c + m * ldc + n, ldc, into);
    };
    int m = 0;
    for (; m + kTileRows <= m_end; m += kTileRows) block(Rows<kTileRows>{}, m);
    for (; m + kRowPad <= m_end; m += kRowPad) block(Rows<kRowPad>{}, m);
    for (; m < m_end; m += 2) block(Rows<2>{}, m);
  }
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
