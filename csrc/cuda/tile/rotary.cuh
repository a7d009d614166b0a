// Rotary position embedding of every head of a tensor. A block has one row; its threads share the
// pairs of elements of all heads.
#pragma once

#include "../../common/rotary.h"
#include "../../params.h"
#include "../launch.h"
#include "../primitives/dependents.h"

namespace flash::cuda {

constexpr int kRowThreads = 512;

template <typename In>
__device__ __forceinline__ float to_float(In x);
template <>
__device__ __forceinline__ float to_float(bfloat16 x) {
  return bfloat16_to_float(x.bits);
}
template <>
__device__ __forceinline__ float to_float(float16 x) {
  return float16_to_float(x.bits);
}
template <typename In>
__device__ __forceinline__ In from_float(float x);
template <>
__device__ __forceinline__ bfloat16 from_float(float x) {
  return {float_to_bfloat16(x)};
}
template <>
__device__ __forceinline__ float16 from_float(float x) {
  return {float_to_float16(x)};
}

// Pair c of one head's row; what does not turn is copied bit for bit.
template <typename In>
__device__ __forceinline__ void rotate_pair(const Rotary& rotary, const In* from, In* to, int dim,
                                            int64_t position, int c) {
  const Rotary::Pair pair = rotary.pair(c);
  if (!pair.turns) {
    to[pair.first] = from[pair.first];
    if (pair.second < dim) to[pair.second] = from[pair.second];
    return;
  }
  float a = to_float(from[pair.first]), b = to_float(from[pair.second]);
  rotary.turn(a, b, position, c);
  to[pair.first] = from_float<In>(a);
  to[pair.second] = from_float<In>(b);
}

template <typename In>
__global__ void __launch_bounds__(kRowThreads)
    rotary_kernel(const __grid_constant__ RotaryParams p) {
  wait_for_primary();
  launch_dependents();
  const SeqRow row = p.find_row(blockIdx.x);
  if (!row.is_inside) return;
  const int64_t position = p.position(row);
  const int pairs = Rotary::pairs(p.head_dim);
  for (int at = threadIdx.x; at < p.num_heads * pairs; at += kRowThreads) {
    const int head = at / pairs, c = at % pairs;
    const auto* from = static_cast<const In*>(p.q.data) + p.q.at(row.dense_batch, row.row, head);
    auto* to = static_cast<In*>(p.out.data) + p.out.at(row.dense_batch, row.row, head);
    rotate_pair(p.rotary, from, to, p.head_dim, position, c);
  }
}

template <typename In>
void rotary(const RotaryParams& p, const Launch& launch) {
  launch_early(&rotary_kernel<In>, dim3(grid_size(p.num_new_rows())), kRowThreads, 0, launch.stream,
               "a rotary kernel", p);
}

template <typename In>
size_t rotary_workspace(const RotaryParams&) {
  return 0;
}

}  // namespace flash::cuda
