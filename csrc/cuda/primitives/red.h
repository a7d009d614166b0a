// red (sm80 and later): float additions in global memory that return nothing. Four values of a lane
// go in one instruction from sm90 on, where they lie side by side; before, lanes lie side by side.
#pragma once

namespace flash::cuda {

// Adds x to the four places of `lane` in a block of 4 kLanes floats, 16-byte aligned.
template <int kLanes>
__device__ __forceinline__ void red_add_4(float* block, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(block + 4 * lane),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(block + kLanes * i + lane),
                 "f"(x[i])
                 : "memory");
#endif
}

// What red_add_4 left there.
template <int kLanes>
__device__ __forceinline__ void red_load_4(float (&x)[4], const float* block, int lane) {
#if __CUDA_ARCH__ >= 900
  const float4 values = *reinterpret_cast<const float4*>(block + 4 * lane);
  x[0] = values.x, x[1] = values.y, x[2] = values.z, x[3] = values.w;
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = block[kLanes * i + lane];
#endif
}

}  // namespace flash::cuda
