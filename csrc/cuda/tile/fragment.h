// The fragment contract on NVIDIA: how a warp holds tiles for mma.sync m16n8k16.
//
// This is the only file of the tile class that knows lanes. A warp's accumulator tile is kRows x
// kCols; lane l holds, of each 16 x 8 block, the elements
//
//      (l / 4,     2 (l % 4)), (l / 4,     2 (l % 4) + 1)     slots 0, 1
//      (l / 4 + 8, 2 (l % 4)), (l / 4 + 8, 2 (l % 4) + 1)     slots 2, 3
//
// so the four lanes of a quad share their rows, and two neighbouring accumulator blocks are the A
// operand of the next product without an exchange.
#pragma once

#include "../../common/dropout.h"
#include "../primitives/convert.h"
#include "../primitives/cp_async.h"
#include "../primitives/exp2.h"
#include "../primitives/ldmatrix.h"
#include "../primitives/mma.h"
#include "../primitives/red.h"

namespace flash::cuda {

constexpr int kWarpSize = 32;

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpSize; }

// Whether any lane of the warp says so.
__device__ __forceinline__ bool warp_any(bool x) { return __any_sync(0xFFFFFFFFu, x); }

// Another lane's value.
__device__ __forceinline__ int from_lane(int x, int lane) {
  return __shfl_sync(0xFFFFFFFFu, x, lane);
}

// The largest value of the warp's lanes.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

// The sum of the lanes up to and including this one.
__device__ __forceinline__ unsigned scan_warp(unsigned x) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const unsigned before = __shfl_up_sync(0xFFFFFFFFu, x, step);
    if (lane_id() >= step) x += before;
  }
  return x;
}

// The sum over groups of kLanes neighbouring lanes, a power of two.
template <int kLanes>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
  return x;
}

// What the lanes of this warp wrote to shared memory is visible to its other lanes.
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// Tiles in shared memory are rows of kDim 16-bit elements in chunks of 16 bytes. The chunk number
// is mixed with the row number so that the eight rows of one 8 x 8 matrix lie in eight different
// bank groups: rows of a multiple of 128 bytes differ in (row & 7); a row of 192 bytes (kDim 96)
// already alternates between two halves of the banks, and (row >> 1) & 3 separates the rest.
template <int kDim>
struct SmemTile {
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kChunks = kDim / 8;

  static constexpr int kSpan = kRowBytes % 128 == 0 ? 128 : 64;  // bytes that the mixing permutes

  static __device__ __forceinline__ int mix(int row) {
    return kSpan == 128 ? (row & 7) : ((row >> 1) & 3);
  }
  // Byte offset of a chunk.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ mix(row)) << 4);
  }
  // The address of chunk + step, step even and known at compile time, from that of chunk 0 or 1 in
  // the same row: one exclusive or, because rows and tiles start at multiples of kSpan. Without
  // this the compiler keeps an address per step in a register over the whole loop, and spills.
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int step) {
    return (address ^ (step * 16 % kSpan)) + step * 16 / kSpan * kSpan;
  }
};

// Which columns of a tile belong to one of kParts warps that share its rows: units of 16 in turns
// within every span of the swizzle, so that a warp's addresses stay one exclusive or apart.
template <int kDim, int kParts>
struct ColumnPart {
  static constexpr int kUnits = kDim / 16 / kParts;                  // of a part
  static constexpr int kTurn = SmemTile<kDim>::kSpan / 32 / kParts;  // neighbouring units of a part
  static constexpr int kSpanChunks = SmemTile<kDim>::kSpan / 16;
  static_assert(kTurn >= 1 && kUnits * kParts * 16 == kDim, "every part has units in every span");

  // Chunks from the part's first one to its unit.
  static constexpr __device__ __forceinline__ int step(int unit) {
    return unit / kTurn * kSpanChunks + 2 * (unit % kTurn);
  }
  static __device__ __forceinline__ int first_chunk(int part) { return 2 * kTurn * part; }
};

// An accumulator: of S, O, P, dS or a gradient.
template <int kRows, int kCols>
struct Accumulator {
  static_assert(kRows % 16 == 0 && kCols % 16 == 0, "two 16 x 8 blocks make an operand");
  static constexpr int kRowBlocks = kRows / 16;
  static constexpr int kColBlocks = kCols / 8;
  static constexpr int kRowsPerThread = 2 * kRowBlocks;
  static constexpr int kColsPerThread = 2 * kColBlocks;

  float x[kRowBlocks][kColBlocks][4];

  // One element of this thread, the same place in every accumulator of the shape. slot and col_slot
  // number the thread's rows and columns and are known at compile time where loops are unrolled.
  struct Place {
    int m, n, i;
    int slot, col_slot;
    int col;  // of the tile
  };
  __device__ __forceinline__ float& operator()(const Place& at) { return x[at.m][at.n][at.i]; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
      for (int n = 0; n < kColBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0.f;
  }

  // f(place) for every element of this thread.
  template <typename F>
  static __device__ __forceinline__ void for_each_place(F f) {
    const int first_col = 2 * (lane_id() % 4);
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
      for (int n = 0; n < kColBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          f(Place{m, n, i, 2 * m + i / 2, 2 * n + i % 2, 8 * n + first_col + i % 2});
  }

  // f(value, slot, column) for every element of this thread: slot numbers the thread's rows.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) {
    for_each_place([&](const Place& at) { f((*this)(at), at.slot, at.col); });
  }

  // Row of the tile that a slot stands for.
  static __device__ __forceinline__ int row(int slot) {
    return 16 * (slot / 2) + 8 * (slot % 2) + lane_id() / 4;
  }

  // Values of this thread's columns, out of one for every column of the tile.
  static __device__ __forceinline__ void load_columns(float (&values)[kColsPerThread],
                                                      const float* of_tile) {
#pragma unroll
    for (int n = 0; n < kColBlocks; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(of_tile + 8 * n + 2 * (lane_id() % 4));
      values[2 * n] = pair.x;
      values[2 * n + 1] = pair.y;
    }
  }
  // Column of the tile that a column slot stands for.
  static __device__ __forceinline__ int col(int col_slot) {
    return 8 * (col_slot / 2) + 2 * (lane_id() % 4) + col_slot % 2;
  }
  // Sums a column's value over the lanes that share it.
  static __device__ __forceinline__ float sum_column(float value) {
#pragma unroll
    for (int lanes = 4; lanes < kWarpSize; lanes *= 2)
      value += __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
    return value;
  }
  static __device__ __forceinline__ bool owns_column() { return lane_id() < 4; }

  // Joins a row's value across the lanes that share it.
  template <typename Op>
  static __device__ __forceinline__ float reduce_row(float value, Op op) {
    value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return op(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
  }
  // The one lane of those that share a row which speaks for it.
  static __device__ __forceinline__ bool owns_row() { return lane_id() % 4 == 0; }
};

// The A operand of one k16 step: kRows x 16.
template <int kRows>
struct OperandA {
  uint32_t r[kRows / 16][4];
};

// Rows [row, row + kRows) and columns [16 step, 16 step + 16) of a tile as A.
template <int kDim, int kRows>
__device__ __forceinline__ void load_a(OperandA<kRows>& a, uint32_t tile, int row, int step) {
  using Tile = SmemTile<kDim>;
  const uint32_t address = tile + Tile::offset(row + lane_id() % 16, lane_id() / 16);
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
    ldmatrix_x4(a.r[m], Tile::advance(address, 2 * step) + 16 * m * Tile::kRowBytes);
}

// The same of a tile that lies transposed: its row 16 step + c holds column 16 step + c of A, rows
// are elements [row, row + kRows) of it.
template <int kDim, int kRows>
__device__ __forceinline__ void load_a_transposed(OperandA<kRows>& a, uint32_t tile, int row,
                                                  int step) {
  using Tile = SmemTile<kDim>;
  static_assert(kRows == 16 || kRows == 32 || kRows == 64, "rows start at a multiple of kRows");
  const int lane = lane_id();
  const uint32_t address =
      tile + Tile::offset(lane % 8 + 8 * (lane / 16), row / 8 + (lane / 8) % 2);
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
    ldmatrix_x4_trans(a.r[m], Tile::advance(address, 2 * m) + 16 * step * Tile::kRowBytes);
}

// Two column blocks of an accumulator, 16 columns, times all row blocks.
template <typename In, int kRows, int kCols>
__device__ __forceinline__ void mma_block(Accumulator<kRows, kCols>& acc, const OperandA<kRows>& a,
                                          int n, const uint32_t (&b)[4]) {
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m) {
    mma_m16n8k16<In>(acc.x[m][2 * n], a.r[m], b[0], b[1]);
    mma_m16n8k16<In>(acc.x[m][2 * n + 1], a.r[m], b[2], b[3]);
  }
}

// All loads of a step stand before its products: with two warps a scheduler nobody else hides their
// latency (H200, head_dim 128, full, 4k: 339 -> 369 TFLOP/s).
//
// S += A K^T for one k16 step over head_dim: K (kCols keys, kDim) lies row by row.
template <typename In, int kDim, int kRows, int kCols>
__device__ __forceinline__ void mma_abt(Accumulator<kRows, kCols>& acc, const OperandA<kRows>& a,
                                        uint32_t tile, int step) {
  using Tile = SmemTile<kDim>;
  const int lane = lane_id();
  const uint32_t address = tile + Tile::offset(lane % 8 + 8 * (lane / 16), (lane / 8) % 2);
  uint32_t b[kCols / 16][4];
#pragma unroll
  for (int n = 0; n < kCols / 16; ++n)
    ldmatrix_x4(b[n], Tile::advance(address, 2 * step) + 16 * n * Tile::kRowBytes);
#pragma unroll
  for (int n = 0; n < kCols / 16; ++n) mma_block<In>(acc, a, n, b[n]);
}

// Two such products in one step, S += A K^T and T += C V^T: twice the loads in flight.
template <typename In, int kDim, int kRows, int kCols>
__device__ __forceinline__ void mma_abt_pair(Accumulator<kRows, kCols>& s, const OperandA<kRows>& a,
                                             uint32_t k_tile, Accumulator<kRows, kCols>& t,
                                             const OperandA<kRows>& c, uint32_t v_tile, int step) {
  using Tile = SmemTile<kDim>;
  const int lane = lane_id();
  const uint32_t offset = Tile::offset(lane % 8 + 8 * (lane / 16), (lane / 8) % 2);
  uint32_t b[2][kCols / 16][4];
#pragma unroll
  for (int n = 0; n < kCols / 16; ++n) {
    ldmatrix_x4(b[0][n], Tile::advance(k_tile + offset, 2 * step) + 16 * n * Tile::kRowBytes);
    ldmatrix_x4(b[1][n], Tile::advance(v_tile + offset, 2 * step) + 16 * n * Tile::kRowBytes);
  }
#pragma unroll
  for (int n = 0; n < kCols / 16; ++n) {
    mma_block<In>(s, a, n, b[0][n]);
    mma_block<In>(t, c, n, b[1][n]);
  }
}

// The A operand of k16 step `step` made of an accumulator's own registers: P as it is.
template <typename In, int kRows, int kCols>
__device__ __forceinline__ OperandA<kRows> as_operand(const Accumulator<kRows, kCols>& p,
                                                      int step) {
  OperandA<kRows> a;
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&x)[4] = p.x[m][2 * step + half];
      a.r[m][2 * half] = pack2<In>(x[0], x[1]);
      a.r[m][2 * half + 1] = pack2<In>(x[2], x[3]);
    }
  return a;
}

// O += A V for one k16 step over V's rows: V (rows, kDim) lies row by row, read transposed. O has
// the columns of one of kParts parts, or of one of its kChunks chunks.
template <typename In, int kDim, int kParts = 1, int kChunks = 1, int kRows, int kCols>
__device__ __forceinline__ void mma_ab(Accumulator<kRows, kCols>& acc, const OperandA<kRows>& a,
                                       uint32_t tile, int step, int part = 0, int chunk = 0) {
  using Tile = SmemTile<kDim>;
  using Part = ColumnPart<kDim, kParts>;
  static_assert(kCols * kChunks == 16 * Part::kUnits, "an accumulator of one chunk");
  const int first = chunk * (kCols / 16);  // unit of the part
  const uint32_t address =
      tile + Tile::offset(lane_id() % 16, Part::first_chunk(part) + lane_id() / 16);
#pragma unroll
  for (int n = 0; n < kCols / 16; n += 2) {  // in pairs: all of a step would not fit into registers
    uint32_t b[2][4];
#pragma unroll
    for (int i = 0; i < 2 && n + i < kCols / 16; ++i)
      ldmatrix_x4_trans(
          b[i], Tile::advance(address, Part::step(first + n + i)) + 16 * step * Tile::kRowBytes);
#pragma unroll
    for (int i = 0; i < 2 && n + i < kCols / 16; ++i) mma_block<In>(acc, a, n + i, b[i]);
  }
}

// The upper 8 bytes moved down: a tile of 32 keys may be the second half of a group. Selected, not
// indexed, so that the words stay in registers.
__device__ __forceinline__ Philox4 shifted(const Philox4& random, bool second_half) {
  if (!second_half) return random;
  return {{random.word[2], random.word[3], 0, 0}};
}

// Drops and scales probabilities; first_row and first_key are those of the tile inside the
// sequence. One Philox call serves the 16 keys of a row and a group of 64 that this lane holds.
template <int kRows, int kCols>
__device__ __forceinline__ void apply_dropout(Accumulator<kRows, kCols>& acc,
                                              const Dropout& dropout, int sequence, int head,
                                              int first_row, int first_key) {
  using Acc = Accumulator<kRows, kCols>;
  constexpr int kGroupBlocks = Dropout::kGroup / 8;  // 8-column blocks of a group
  constexpr int kBlocks = Acc::kColBlocks < kGroupBlocks ? Acc::kColBlocks : kGroupBlocks;
  static_assert(kBlocks == kGroupBlocks || 2 * kBlocks == kGroupBlocks, "a group or half of one");
  const float scale = dropout.keep_scale();
  const bool second_half = kBlocks < kGroupBlocks && first_key % Dropout::kGroup != 0;
#pragma unroll
  for (int slot = 0; slot < Acc::kRowsPerThread; ++slot)
#pragma unroll
    for (int group = 0; group < Acc::kColBlocks / kBlocks; ++group) {
      const Philox4 random =
          shifted(dropout.bytes(sequence, head, first_row + Acc::row(slot),
                                first_key / Dropout::kGroup + group, lane_id() % 4),
                  second_half);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& prob = acc.x[slot / 2][group * kBlocks + n][2 * (slot % 2) + c];
          prob = dropout.keep_byte(random, n, c) ? prob * scale : 0.f;
        }
    }
}

// f(place, factor) for every element of a tile of P^T, whose rows are keys: factor is 0 where
// dropout drops it and keep_scale where not. One Philox call serves the up to 32 keys of a group
// that this lane holds in one column.
template <typename Acc, typename F>
__device__ __forceinline__ void for_each_dropout(const Dropout& dropout, int sequence, int head,
                                                 int first_row, int first_key, F f) {
  static_assert(Dropout::kGroup % (16 * Acc::kRowBlocks) == 0, "a tile's keys are of one group");
  const float scale = dropout.keep_scale();
  const int in_group = first_key % Dropout::kGroup;
  const int key = lane_id() / 4;  // of this lane in every block of 8
#pragma unroll
  for (int n = 0; n < Acc::kColBlocks; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int col = 8 * n + 2 * (lane_id() % 4) + c;
      const Philox4 random =
          dropout.bytes(sequence, head, first_row + col, first_key / Dropout::kGroup, key / 2);
#pragma unroll
      for (int slot = 0; slot < Acc::kRowsPerThread; ++slot) {
        const bool keep = dropout.keep_byte(random, in_group / 8 + slot, key % 2);
        f(typename Acc::Place{slot / 2, n, 2 * (slot % 2) + c, slot, 2 * n + c, col},
          keep ? scale : 0.f);
      }
    }
}

// Writes the tile, or one of kParts parts of its columns or of kChunks chunks of that, rows
// multiplied by scale[slot], as 16-bit elements into shared memory from row `row` on.
template <typename In, int kDim, int kParts = 1, int kChunks = 1, int kRows, int kCols>
__device__ __forceinline__ void store_tile(const Accumulator<kRows, kCols>& acc, char* tile,
                                           int row, const float* scale, int part = 0,
                                           int chunk = 0) {
  using Part = ColumnPart<kDim, kParts>;
  static_assert(kCols * kChunks == 16 * Part::kUnits, "an accumulator of one chunk");
  const int first = chunk * (kCols / 16);  // unit of the part
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float s = scale[2 * m + half];
        const int chunk = Part::first_chunk(part) + Part::step(first + n / 2) + n % 2;
        const int at = SmemTile<kDim>::offset(row + 16 * m + 8 * half + lane / 4, chunk);
        *reinterpret_cast<uint32_t*>(tile + at + 4 * (lane % 4)) =
            pack2<In>(acc.x[m][n][2 * half] * s, acc.x[m][n][2 * half + 1] * s);
      }
}

// The same of a tile that covers columns [first_col, first_col + kCols) of a wider one, unscaled.
template <typename In, int kDim, int kRows, int kCols>
__device__ __forceinline__ void store_columns(const Accumulator<kRows, kCols>& acc, char* tile,
                                              int row, int first_col) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at =
            SmemTile<kDim>::offset(row + 16 * m + 8 * half + lane / 4, first_col / 8 + n);
        *reinterpret_cast<uint32_t*>(tile + at + 4 * (lane % 4)) =
            pack2<In>(acc.x[m][n][2 * half], acc.x[m][n][2 * half + 1]);
      }
}

// An accumulator in global memory lies in the order of its registers: kRows x kCols floats of which
// nobody but these two functions knows the places.
template <int kRows, int kCols>
__device__ __forceinline__ void add_to_global(const Accumulator<kRows, kCols>& acc, float* target) {
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
      red_add_4<kWarpSize>(target + (m * (kCols / 8) + n) * 4 * kWarpSize, lane_id(), acc.x[m][n]);
}

template <int kRows, int kCols>
__device__ __forceinline__ void load_from_global(Accumulator<kRows, kCols>& acc,
                                                 const float* source) {
#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
      red_load_4<kWarpSize>(acc.x[m][n], source + (m * (kCols / 8) + n) * 4 * kWarpSize, lane_id());
}

}  // namespace flash::cuda
