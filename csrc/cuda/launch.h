// Host side of a launch: error checks, grid limits, and which device code runs here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace flash::cuda {

// A value that a generic lambda can take as a template argument.
template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("flash: ") + what +
                             " failed: " + cudaGetErrorString(error));
}

// Lets a kernel's blocks have more dynamic shared memory than the 48 KB that all may use.
inline void allow_smem(const void* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "the shared memory of a kernel");
}

// Blocks of a one-dimensional grid.
inline unsigned grid_size(int64_t blocks) {
  constexpr int64_t kMost = 2147483647;
  if (blocks > kMost)
    throw std::runtime_error("flash: the problem has " + std::to_string(blocks) +
                             " tiles, above the " + std::to_string(kMost) +
                             " of one launch; split the batch into calls");
  return static_cast<unsigned>(blocks);
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "asking a device for its attributes");
  return value;
}

// Whether a kernel's code waits for the grid before it (wait_for_primary), which needs sm90 where
// it was compiled; PTX of an earlier architecture may run on a later device.
inline bool waits_for_primary(const void* kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "asking a kernel for its attributes");
  return attributes.ptxVersion >= 90;
}

// Starts a grid that may take its place while the one ahead in the stream still runs, from sm90 on:
// the kernel waits for that one itself (wait_for_primary), before it reads or writes.
template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, int threads, size_t smem_bytes,
                  void* stream, const char* what, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = waits_for_primary(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, args...), what);
}

// Where the machine code of a kernel runs: on its own architecture and later ones of the same major
// version, or on its own alone (Hopper's sm_90a instructions; Tegra's sm_87).
enum class Runs { kSameMajor, kExactly };
// What else is in the library: PTX is compiled by the driver for any later architecture.
enum class Carries { kCode, kCodeAndPtx };

// Whether the current device runs a kernel built for compute capability `built` whose blocks ask
// for up to smem_kb of shared memory.
inline bool runs_on(int built, int smem_kb, Runs runs, Carries carries) {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  const int here = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
                   device_attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) < smem_kb * 1024)
    return false;
  if (here == built) return true;
  if (carries == Carries::kCodeAndPtx && here > built) return true;
  return runs == Runs::kSameMajor && here / 10 == built / 10 && here > built && here != 87;
}

}  // namespace flash::cuda
