// How a warpgroup holds tiles for wgmma: the only file of the class that knows threads.
//
// An accumulator tile is 64 x kN over 128 threads. Warp w of the warpgroup holds rows 16 w to
// 16 w + 15; of each 16 x 8 block, lane l holds the elements
//
//      (l / 4,     2 (l % 4)), (l / 4,     2 (l % 4) + 1)     slot 0
//      (l / 4 + 8, 2 (l % 4)), (l / 4 + 8, 2 (l % 4) + 1)     slot 1
//
// so the four lanes of a quad share their rows, and two neighbouring blocks, rounded to 16 bits,
// are the A operand of the next product's k16 step without an exchange.
#pragma once

#include "../../common/mask.h"
#include "../primitives/convert.h"
#include "../primitives/exp2.h"
#include "../primitives/stmatrix.h"
#include "../primitives/wgmma.h"

namespace flash::cuda::sm90 {

constexpr int kWarpSize = 32;
constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of every product
constexpr int kBlockDim = 64;       // elements of a 128-byte row of a shared-memory block
constexpr int kSlots = 2;           // rows that a thread holds

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ bool warp_any(bool x) { return __any_sync(0xFFFFFFFFu, x); }

// Row of the warpgroup's tile that a slot stands for.
__device__ __forceinline__ int row_of(int slot) {
  return threadIdx.x % kWarpgroup / kWarpSize * 16 + 8 * slot + lane_id() / 4;
}
// The one lane of those that share a row which speaks for it.
__device__ __forceinline__ bool owns_row() { return lane_id() % 4 == 0; }

// Joins a row's value across the lanes that share it.
template <typename Op>
__device__ __forceinline__ float reduce_row(float value, Op op) {
  value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return op(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

template <int kN>
struct Accumulator {
  float x[kN / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) x[i] = 0.f;
  }

  // f(value, slot, column) for every element of this thread.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) {
    const int first_col = 2 * (lane_id() % 4);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) f(x[i], i / 2 % 2, i / 4 * 8 + first_col + i % 2);
  }
};

// The largest value of each row of a tile, -inf in a row of NaN.
template <int kN>
__device__ __forceinline__ void exact_row_maxima(const Accumulator<kN>& s, float (&m)[kSlots]) {
  float most[kSlots][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) most[i / 2 % 2][i % 2] = fmaxf(most[i / 2 % 2][i % 2], s.x[i]);
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot)
    m[slot] = reduce_row(fmaxf(most[slot][0], most[slot][1]),
                         [](float a, float b) { return fmaxf(a, b); });
}

// The same by Hopper's maximum of three integers, half an instruction a score: floats compare like
// their bits where one of them is not negative. A warp with a row without such a score goes the
// exact way. Returns whether asks(m) in some lane.
template <int kN, typename Asks>
__device__ __forceinline__ bool row_maxima(const Accumulator<kN>& s, float (&m)[kSlots],
                                           Asks asks) {
  constexpr int kLeast = -2147483647 - 1;
  int most[kSlots][2] = {{kLeast, kLeast}, {kLeast, kLeast}};
#pragma unroll
  for (int i = 0; i < kN / 2; i += 2) {
    int& x = most[i / 2 % 2][i / 4 % 2];
    x = __vimax3_s32(x, __float_as_int(s.x[i]), __float_as_int(s.x[i + 1]));
  }
  bool negative = false;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    int x = max(most[slot][0], most[slot][1]);
    x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
    m[slot] = __int_as_float(x);
    negative |= x < 0;
  }
  if (warp_any(negative)) exact_row_maxima(s, m);
  return warp_any(asks(m));
}

// P as the A operands of its k16 steps.
template <int kN>
struct Operand {
  uint32_t r[kN / 16][4];
};

template <typename In, int kN>
__device__ __forceinline__ void to_operand(Operand<kN>& p, const Accumulator<kN>& s) {
#pragma unroll
  for (int k = 0; k < kN / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) p.r[k][i] = pack2<In>(s.x[8 * k + 2 * i], s.x[8 * k + 2 * i + 1]);
#pragma unroll
  for (int k = 0; k < kN / 16; ++k) pin(p.r[k]);  // complete before the products' fence
}

// ---- tiles in shared memory --------------------------------------------------------------------

// A (kRows, kDim) tile: blocks of kRows rows of 64 elements, one after the other, as TMA fills them
// under the 128-byte swizzle.
template <int kRows, int kDim>
struct SmemTile {
  static constexpr int kBlocks = (kDim + kBlockDim - 1) / kBlockDim;
  static constexpr int kBlockBytes = kRows * 128;
  static constexpr int kBytes = kBlocks * kBlockBytes;

  // k16 step of rows [row, ...) with head_dim contracted: Q, K of a score product.
  static __device__ __forceinline__ uint64_t along_dim(uint32_t tile, int row, int step) {
    return wgmma_descriptor(tile + step / 4 * kBlockBytes + row * 128 + step % 4 * 32);
  }
  // k16 step with rows contracted: V.
  static __device__ __forceinline__ uint64_t along_rows(uint32_t tile, int step) {
    return wgmma_descriptor(tile + step * 16 * 128, kBlockBytes);
  }
};

// Zeroes rows outside `keep` of a tile, by a warpgroup. Whole rows, so the swizzle does not
// matter.
template <int kRows, int kDim>
__device__ __forceinline__ void clear_rows_outside(char* tile, Range keep) {
  using Tile = SmemTile<kRows, kDim>;
  for (int at = threadIdx.x % kWarpgroup; at < Tile::kBytes / 16; at += kWarpgroup) {
    const int row = at / 8 % kRows;
    if (row < keep.begin || row >= keep.end) *reinterpret_cast<uint4*>(tile + 16 * at) = uint4{};
  }
}

// ---- O -----------------------------------------------------------------------------------------

// Four lanes of a quad hold a 4 x 4 matrix of words, lane l column l; afterwards lane l holds row
// l.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4]) {
  const bool odd = lane_id() & 1, high = lane_id() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? r[i] : r[i + 1], 1);
    r[i] = odd ? got : r[i];
    r[i + 1] = odd ? r[i + 1] : got;
  }
  // Now the lane has, of the blocks of its own parity, the words of its pair.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, high ? r[i] : r[i + 2], 2);
    r[i] = high ? got : r[i];
    r[i + 2] = high ? r[i + 2] : got;
  }
}

// Rows of O times scale[slot] into a tile in shared memory whose blocks have kBlockRows rows.
template <typename In, int kBlockRows, int kDim>
__device__ __forceinline__ void store_tile(const Accumulator<kDim>& o, uint32_t tile,
                                           const float (&scale)[kSlots]) {
  // Lane l addresses row l % 8 of matrix l / 8: rows of slot 0, of slot 1, then the next eight
  // columns of both.
  const int matrix = lane_id() / 8;
  const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + matrix % 2 * 8 + lane_id() % 8;
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 2) {
    const int chunk = n % 8 + matrix / 2;
    const float (&x)[kDim / 2] = o.x;
    stmatrix_x4(tile + n / 8 * kBlockRows * 128 + row * 128 + ((chunk ^ row % 8) << 4),
                pack2<In>(x[4 * n] * scale[0], x[4 * n + 1] * scale[0]),
                pack2<In>(x[4 * n + 2] * scale[1], x[4 * n + 3] * scale[1]),
                pack2<In>(x[4 * n + 4] * scale[0], x[4 * n + 5] * scale[0]),
                pack2<In>(x[4 * n + 6] * scale[1], x[4 * n + 7] * scale[1]));
  }
}

// Rows of O times scale[slot], as 16-bit elements, to row_data[slot] (null: no such row), `dim`
// elements of each. Four lanes write 64 contiguous bytes.
template <typename In, int kDim>
__device__ __forceinline__ void store_rows(const Accumulator<kDim>& o, const float (&scale)[kSlots],
                                           char* const (&row_data)[kSlots], int dim) {
  static_assert(kDim % 32 == 0, "four blocks of eight columns are stored at once");
  const bool aligned = dim % 8 == 0;
#pragma unroll
  for (int n = 0; n < kDim / 8; n += 4)
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        r[i] = pack2<In>(o.x[4 * (n + i) + 2 * slot] * scale[slot],
                         o.x[4 * (n + i) + 2 * slot + 1] * scale[slot]);
      transpose_quad(r);
      const int col = 8 * (n + lane_id() % 4);
      if (row_data[slot] == nullptr || col >= dim) continue;
      char* target = row_data[slot] + 2 * col;
      if (aligned) {
        *reinterpret_cast<uint4*>(target) = make_uint4(r[0], r[1], r[2], r[3]);
        continue;
      }
#pragma unroll
      for (int d = 0; d < 8; ++d)
        if (col + d < dim)
          reinterpret_cast<uint16_t*>(target)[d] =
              static_cast<uint16_t>(r[d / 2] >> (16 * (d % 2)));
    }
}

}  // namespace flash::cuda::sm90
