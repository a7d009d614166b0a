// New keys and values into a cache, in place, the keys rotated on the way. A block has one new row:
// its threads share the pairs of elements of all heads, k's and v's. What would lie past a
// sequence's capacity, or in a page that does not exist, is dropped.
#pragma once

#include "rotary.cuh"

namespace flash::cuda {

// Read before it is known where it goes: the length and the page are still on their way.
template <typename In>
__device__ __forceinline__ void move_pair(const View& source, const View& cache, const NewRow& row,
                                          int head, int dim, const Rotary& rotary, int c) {
  const Rotary::Pair pair = rotary.pair(c);
  const In* from = static_cast<const In*>(source.data) + source.at(row.batch_new, row.row, head);
  In first = from[pair.first], second = pair.second < dim ? from[pair.second] : In{};
  if (!row.is_written) return;
  if (pair.turns) {
    float a = to_float(first), b = to_float(second);
    rotary.turn(a, b, row.position, c);
    first = from_float<In>(a);
    second = from_float<In>(b);
  }
  In* to = static_cast<In*>(cache.data) + cache.at(row.batch_cache, row.row_cache, head);
  to[pair.first] = first;
  if (pair.second < dim) to[pair.second] = second;
}

template <typename In>
__global__ void __launch_bounds__(kRowThreads)
    append_kernel(const __grid_constant__ AppendParams p) {
  wait_for_primary();
  launch_dependents();
  const int64_t b = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (b < p.batch) p.seqused_k[b] = p.used_after(static_cast<int>(b));
  if (blockIdx.x >= p.num_new_rows()) return;  // this block came for the lengths
  const NewRow row = p.locate(blockIdx.x);
  const int pairs_k = Rotary::pairs(p.head_dim), pairs = pairs_k + Rotary::pairs(p.head_dim_v);
  for (int at = threadIdx.x; at < p.num_heads_k * pairs; at += kRowThreads) {
    const int head = at / pairs, c = at % pairs;
    if (c < pairs_k)
      move_pair<In>(p.new_k, p.k, row, head, p.head_dim, p.rotary, c);
    else
      move_pair<In>(p.new_v, p.v, row, head, p.head_dim_v, Rotary{}, c - pairs_k);
  }
}

template <typename In>
void append(const AppendParams& p, const Launch& launch) {
  const int64_t blocks = max_of<int64_t>(p.num_new_rows(), ceil_div<int64_t>(p.batch, kRowThreads));
  launch_early(&append_kernel<In>, dim3(grid_size(blocks)), kRowThreads, 0, launch.stream,
               "an append kernel", p);
}

template <typename In>
size_t append_workspace(const AppendParams&) {
  return 0;
}

}  // namespace flash::cuda
