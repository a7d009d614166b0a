// Scores of a block of keys anew, by one warp, from global memory: for the rare row whose
// exponentials overflowed before anybody knew its maximum.
//
// mma.sync holds a 16 x 8 tile as wgmma's warps do, so the results fit into the same registers.
// Slow and independent of the pipeline: nothing waits, nothing is kept in shared memory for it.
#pragma once

#include "../../params.h"
#include "../primitives/mma.h"

#include "fragment.h"

namespace flash::cuda::sm90 {

// The rows of a head, as a warp reads them.
struct HeadRows {
  const uint16_t* data;
  int64_t row_stride;
  int dim;  // elements that exist

  // Elements `at`, even, and at + 1 of a row; zero past its end.
  __device__ __forceinline__ uint32_t pair(int row, int at) const {
    const uint16_t* source = data + row * row_stride + at;
    if (at + 1 < dim) return *reinterpret_cast<const uint32_t*>(source);  // rows start at 16 bytes
    return at < dim ? *source : 0u;
  }
};

__device__ __forceinline__ HeadRows head_rows(const View& view, int dim, int batch, int64_t offset,
                                              int head) {
  return {static_cast<const uint16_t*>(view.data) + view.at(batch, offset, head), view.row_stride,
          dim};
}

// s[2 slot + c] = <q of the slot's row, k of the key at column 2 (lane % 4) + c> of the eight keys
// from `key`. Rows and keys are clamped to those that exist.
template <typename In>
__device__ __forceinline__ void score_eight(float (&s)[4], const HeadRows& q, const HeadRows& k,
                                            const int (&row)[kSlots], int last_row, int key,
                                            int last_key) {
  const int i0 = min_of(row[0], last_row), i1 = min_of(row[1], last_row);
  const int j = min_of(key + lane_id() / 4, last_key);
  s[0] = s[1] = s[2] = s[3] = 0.f;
#pragma unroll 1
  for (int d = 0; d < q.dim; d += 16) {
    const int at = d + 2 * (lane_id() % 4);
    const uint32_t a[4] = {q.pair(i0, at), q.pair(i1, at), q.pair(i0, at + 8), q.pair(i1, at + 8)};
    mma_m16n8k16<In>(s, a, k.pair(j, at), k.pair(j, at + 8));
  }
}

}  // namespace flash::cuda::sm90
