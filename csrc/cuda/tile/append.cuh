// New keys and values into a cache, in place, the keys rotated on the way. A block has one new row:
// its threads share the pairs of elements of all heads, k's and v's. What would lie past a
// sequence's capacity, or in a page that does not exist, is dropped.
#pragma once

#include "rotary.cuh"

namespace flash::cuda {

template <typename In>
__global__ void __launch_bounds__(kRowThreads)
    append_kernel(const __grid_constant__ AppendParams p) {
  const int b = static_cast<int>(blockIdx.x * kRowThreads + threadIdx.x);
  if (b < p.batch) p.seqused_k[b] = p.used_after(b);
  if (blockIdx.x >= p.num_new_rows()) return;  // this block came for the lengths
  const NewRow row = p.locate(blockIdx.x);
  if (!row.is_written) return;
  const int pairs_k = Rotary::pairs(p.head_dim), pairs = pairs_k + Rotary::pairs(p.head_dim_v);
  for (int at = threadIdx.x; at < p.num_heads_k * pairs; at += kRowThreads) {
    const int head = at / pairs, c = at % pairs;
    if (c < pairs_k) {
      const auto* from =
          static_cast<const In*>(p.new_k.data) + p.new_k.at(row.batch_new, row.row, head);
      auto* to = static_cast<In*>(p.k.data) + p.k.at(row.batch_cache, row.row_cache, head);
      rotate_pair(p.rotary, from, to, p.head_dim, row.position, c);
    } else {
      const auto* from =
          static_cast<const In*>(p.new_v.data) + p.new_v.at(row.batch_new, row.row, head);
      auto* to = static_cast<In*>(p.v.data) + p.v.at(row.batch_cache, row.row_cache, head);
      rotate_pair(Rotary{}, from, to, p.head_dim_v, row.position, c - pairs_k);
    }
  }
}

template <typename In>
void append(const AppendParams& p, const Launch& launch) {
  const int64_t blocks = max_of<int64_t>(p.num_new_rows(), ceil_div<int64_t>(p.batch, kRowThreads));
  append_kernel<In>
      <<<grid_size(blocks), kRowThreads, 0, static_cast<cudaStream_t>(launch.stream)>>>(p);
  check(cudaGetLastError(), "an append kernel");
}

inline size_t append_workspace(const AppendParams&) { return 0; }

}  // namespace flash::cuda
