// Host side of a launch: error checks, grid limits, and which device code runs here.
#pragma once

#include <cuda_runtime_api.h>

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
    throw std::runtime_error(std::string("flash: launching ") + what +
                             " failed: " + cudaGetErrorString(error));
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

// Compute capability of the current device as major * 10 + minor.
inline int current_capability() {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "on the current device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "on a device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "on a device");
  return 10 * major + minor;
}

// Code of one architecture runs on later ones of the same major version; code with Hopper's own
// instructions (sm_90a) on that one only.
inline bool runs_on(int built) {
  const int here = current_capability();
  return built == 90 ? here == 90 : here / 10 == built / 10 && here >= built;
}

}  // namespace flash::cuda
