// cp.async (sm80 and later): 16 bytes from global to shared memory past the registers.
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Reads `bytes` (0 to 16) from `source`, 16-byte aligned, and zero-fills the rest.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash::cuda
