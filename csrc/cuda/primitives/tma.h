// TMA, the tensor memory accelerator (sm_90): boxes of a strided tensor to swizzled shared memory
// and back, by one thread. The tensor is described by a map that the host encodes and a kernel
// takes as a
// __grid_constant__ parameter.
#pragma once

#include <cuda.h>  // types alone: the one function comes from the driver's entry points
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../common/number.h"
#include "../launch.h"

namespace flash::cuda {

// A (batch, head, row, dim) tensor of 16-bit elements; sizes and strides from the innermost out.
// Strides are in elements; that of dim is 1.
struct TmaTensor {
  const void* data;
  int64_t size[4];    // dim, rows, heads, batch
  int64_t stride[3];  // of rows, heads, batch
};

// What a map can hold (checked against the driver's answers): 16-byte aligned bases and strides,
// strides below 2^40 bytes, sizes from 1 to 2^31 here, so that a coordinate is an int.
inline bool tma_fits(const TmaTensor& t) {
  bool fits = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (const int64_t size : t.size) fits &= size >= 1 && size < (int64_t{1} << 31);
  for (int d = 0; d < 3; ++d)  // the stride of a dimension of one element is never used
    fits &= t.size[d + 1] == 1 ||
            (t.stride[d] >= 0 && t.stride[d] % 8 == 0 && t.stride[d] < (int64_t{1} << 39));
  return fits;
}

using TmaEncode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                               const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                               const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

template <typename In>
constexpr CUtensorMapDataType tma_type() {
  return std::is_same_v<In, bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// The driver's function, looked up once: no link against libcuda.
inline TmaEncode tma_encode() {
  static const TmaEncode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result),
          "asking the driver for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || !found)
      throw std::runtime_error("flash: the driver has no cuTensorMapEncodeTiled (CUDA 12.0)");
    return reinterpret_cast<TmaEncode>(found);
  }();
  return encode;
}

// Boxes of 64 elements of dim x `rows` of one head, 128-byte swizzle. Elements past a size read as
// zero and are not written.
inline CUtensorMap tma_map(const TmaTensor& t, CUtensorMapDataType type, int rows) {
  cuuint64_t size[4], stride[3];
  for (int d = 0; d < 4; ++d) size[d] = static_cast<cuuint64_t>(t.size[d]);
  for (int d = 0; d < 3; ++d)
    stride[d] = t.size[d + 1] == 1 ? 16 : static_cast<cuuint64_t>(2 * t.stride[d]);
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tma_encode()(&map, type, 4, const_cast<void*>(t.data), size, stride, box, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("flash: the driver refuses a tensor map, error " +
                             std::to_string(static_cast<int>(result)));
  return map;
}

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box to shared memory (a multiple of 1024); its bytes complete on the mbarrier.
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                         int dim, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(dim), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// One box from shared memory; the part outside the tensor is dropped.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int dim, int row,
                                          int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(source), "r"(dim), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// This thread's stores have read their shared memory.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Ordinary writes to shared memory before this are seen by wgmma and TMA after the next barrier.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash::cuda
