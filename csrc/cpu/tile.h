// Tiles in a thread's own memory: allocation, loads that convert and zero-fill, stores.
#pragma once

#include <stdlib.h>

#include <new>
#include <type_traits>

#include "../params.h"
#include "gemm.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

constexpr int kBlockM = 64;  // query rows of a tile
constexpr int kBlockN = 64;  // keys of a tile; one dropout group

// A zeroed block of `count` elements, aligned to a cache line.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = ceil_div<size_t>(max_of<int64_t>(count, 1) * sizeof(T), 64) * 64;
    data_ = static_cast<T*>(aligned_alloc(64, bytes));
    if (!data_) throw std::bad_alloc();
    memset(static_cast<void*>(data_), 0, bytes);
  }
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data_; }

 private:
  T* data_;
};

// Rows [first, first + count) of one head as a tile (count, dim) with leading dimension ld; `at`
// gives the element offset of a row. Rows outside `visible` are zero-filled and never read: nothing
// of them can reach a product.
template <typename In, typename At>
inline void load_rows(Acc<In>* tile, int ld, const View& view, At at, int first, int count, int dim,
                      Range visible) {
  for (int r = 0; r < count; ++r) {
    Acc<In>* row = tile + r * ld;
    const int i = first + r;
    if (i < visible.begin || i >= visible.end) {
      memset(static_cast<void*>(row), 0, dim * sizeof(Acc<In>));
      continue;
    }
    const In* source = static_cast<const In*>(view.data) + at(i);
    if constexpr (std::is_same_v<In, Acc<In>>) {
      memcpy(static_cast<void*>(row), source, dim * sizeof(In));
    } else {
      for (int d = 0; d < dim; ++d) row[d] = to_acc(source[d]);
    }
  }
}

// (rows, cols) -> (cols, rows); leading dimensions in elements, rows a multiple of the lanes.
template <typename T>
inline void transpose(T* to, int ld_to, const T* from, int ld_from, int rows, int cols) {
  if constexpr (kVecBytes == 32) {
    // Columns gathered lane by lane and stored whole: half the time of a store an element on
    // AVX2, nothing gained with 16-byte vectors.
    constexpr int kLanes = VecOf<T>::kLanes;
    for (int r = 0; r < rows; r += kLanes)
      for (int c = 0; c < cols; ++c) {
        Vec<T> column;
        for (int lane = 0; lane < kLanes; ++lane) column[lane] = from[(r + lane) * ld_from + c];
        store(to + c * ld_to + r, column);
      }
  } else {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < cols; ++c) to[c * ld_to + r] = from[r * ld_from + c];
  }
}

// Writes `count` rows of a tile, each multiplied by scale[r] when scale is given.
template <typename In>
inline void store_rows(const View& view, int batch, int head, int64_t offset, int first, int count,
                       int dim, const Acc<In>* tile, int ld, const Acc<In>* scale = nullptr) {
  for (int r = 0; r < count; ++r) {
    In* target = static_cast<In*>(view.data) + view.at(batch, offset + first + r, head);
    const Acc<In> factor = scale ? scale[r] : Acc<In>(1);
    for (int d = 0; d < dim; ++d) target[d] = from_acc<In>(tile[r * ld + d] * factor);
  }
}

// Splits [0, count) over torch's threads; body(begin, end) may own scratch for its whole range.
template <typename Body>
inline void parallel(const Launch& launch, int64_t count, const Body& body) {
  if (count == 0) return;
  launch.parallel_for(
      0, count,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
