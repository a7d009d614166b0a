// griddepcontrol (sm90 and later): a grid that starts while the one before it in the stream still
// runs. On earlier architectures both do nothing, and the launch leaves the attribute out.
#pragma once

namespace flash::cuda {

// The next grid may take its place on the multiprocessors.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the grid before has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash::cuda
