// Tiles between global and shared memory: issue, commit, wait.
//
// On NVIDIA a copy is cp.async, 16 bytes a thread, in flight until copy_wait. Rows start at
// multiples of 16 bytes: the table says so (row_alignment), and the caller copies what does not.
#pragma once

#include "../../common/mask.h"
#include "../../params.h"
#include "fragment.h"

namespace flash::cuda {

__device__ __forceinline__ void copy_commit() { cp_async_commit(); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  cp_async_wait<kPending>();
}

// Rows one after the other: addresses are sums, not products. Both sources begin at row `row` of
// the tile that from() is given, the thread's own.
class RowSource {
 public:
  __device__ __forceinline__ RowSource(const Pages&, const View& view, int batch, int64_t offset,
                                       int head, int row, int byte)
      : row_bytes_(2 * view.row_stride),
        data_(static_cast<const char*>(view.data) + 2 * view.at(batch, offset + row, head) + byte) {
  }

  struct Cursor {
    const char* data;
    int64_t row_bytes;
    __device__ __forceinline__ const char* get(bool) const { return data; }
    __device__ __forceinline__ void advance(int rows) { data += rows * row_bytes; }
  };
  __device__ __forceinline__ Cursor from(int first) const {
    return {data_ + first * row_bytes_, row_bytes_};
  }

 private:
  int64_t row_bytes_;
  const char* data_;
};

// Rows in pages: one look-up a row, in the page table.
class PageSource {
 public:
  __device__ __forceinline__ PageSource(const Pages& pages, const View& view, int batch, int64_t,
                                        int head, int row, int byte)
      : pages_(pages),
        page_bytes_(2 * view.batch_stride),
        row_bytes_(2 * view.row_stride),
        batch_(batch),
        row_(row),
        data_(static_cast<const char*>(view.data) + 2 * view.at(0, 0, head) + byte) {}

  struct Cursor {
    const PageSource& source;
    int row;
    // A row that is not seen may have no entry; any address will do, for nothing is read there.
    __device__ __forceinline__ const char* get(bool seen) const {
      return seen ? source.at(row) : source.data_;
    }
    __device__ __forceinline__ void advance(int rows) { row += rows; }
  };
  __device__ __forceinline__ Cursor from(int first) const { return {*this, first + row_}; }

 private:
  __device__ __forceinline__ const char* at(int row) const {
    const int index = row / pages_.page_size;
    return data_ + pages_.page(batch_, index) * page_bytes_ +
           (row - index * pages_.page_size) * row_bytes_;
  }

  const Pages& pages_;
  int64_t page_bytes_, row_bytes_;
  int batch_, row_;
  const char* data_;
};

// Copies of (kRows, kDim) tiles of one head by kThreads threads. A thread owns one chunk column and
// every kRowStep-th row. Where a row lies is Source's to say: at(i), a pointer to the thread's
// chunk of row i, asked for rows of increasing number.
template <int kDim, int kRows, int kThreads, typename Source = RowSource>
class TileCopy {
  static constexpr int kChunks = SmemTile<kDim>::kChunks;
  static constexpr int kSlots = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // 96, 192: some idle
  static constexpr int kRowStep = kThreads / kSlots;
  static_assert(kRows % kRowStep == 0, "every thread copies the same number of rows");

 public:
  // `dim` elements of a row exist; the rest of a tile row is zero.
  __device__ __forceinline__ TileCopy(const View& view, int batch, int64_t offset, int head,
                                      int dim, const Pages& pages = {})
      : bytes_(clamp_to(2 * dim - 16 * chunk(), 0, 16)),
        source_(pages, view, batch, offset, head, row(), bytes_ > 0 ? 16 * chunk() : 0) {}

  // Rows [first, first + kRows) into `tile`. Rows outside `visible` are zero-filled and never read:
  // 0 x NaN must not come into being.
  __device__ __forceinline__ void issue(char* tile, int first, Range visible) const {
    if (kChunks < kSlots && chunk() >= kChunks) return;
    const bool all = first >= visible.begin && first + kRows <= visible.end;
    const uint32_t target = smem_address(tile);
    auto source = source_.from(first);
#pragma unroll
    for (int r = 0; r < kRows; r += kRowStep) {
      const int at = first + row() + r;
      const bool seen = all || (at >= visible.begin && at < visible.end);
      cp_async_16(target + SmemTile<kDim>::offset(row() + r, chunk()), source.get(seen),
                  seen ? bytes_ : 0);
      source.advance(kRowStep);
    }
  }

 private:
  static __device__ __forceinline__ int row() { return threadIdx.x / kSlots; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kSlots; }

  int bytes_;  // of this thread's chunk that exist
  Source source_;
};

// kCount floats, one for every row of a tile; both addresses are multiples of 16 bytes.
template <int kCount>
__device__ __forceinline__ void copy_row_values(float* target, const float* source, int thread) {
  if (thread >= 0 && thread < kCount / 4)
    cp_async_16(smem_address(target + 4 * thread), source + 4 * thread, 16);
}

// Rows [row, row + count) of a tile to global rows `first`...; one warp's own rows.
template <int kDim>
__device__ __forceinline__ void copy_out(char* data, int64_t row_bytes, int dim, bool aligned,
                                         const char* tile, int row, int first, int count) {
  constexpr int kChunks = SmemTile<kDim>::kChunks;
  for (int at = lane_id(); at < count * kChunks; at += kWarpSize) {
    const int r = at / kChunks, chunk = at % kChunks;
    if (8 * chunk >= dim) continue;
    const uint4 x = *reinterpret_cast<const uint4*>(tile + SmemTile<kDim>::offset(row + r, chunk));
    char* target = data + (first + r) * row_bytes + 16 * chunk;
    if (aligned && 8 * chunk + 8 <= dim) {
      *reinterpret_cast<uint4*>(target) = x;
      continue;
    }
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int d = 0; d < 8; ++d)
      if (8 * chunk + d < dim)
        reinterpret_cast<uint16_t*>(target)[d] =
            static_cast<uint16_t>(words[d / 2] >> (16 * (d % 2)));
  }
}

}  // namespace flash::cuda
