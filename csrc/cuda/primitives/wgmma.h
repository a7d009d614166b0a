// wgmma (sm_90a): D += A B by a warpgroup, D in registers, B in shared memory, A in either.
// PTX ISA, "Asynchronous warpgroup level matrix instructions".
//
// The products run behind the instruction stream: wgmma_fence before the first one after registers
// were written, wgmma_commit after the last one of a group, wgmma_wait before anything reads the
// accumulators, or overwrites them, the A registers or the shared memory.
#pragma once

#include <cstdint>

#include "../../common/number.h"

namespace flash::cuda {

// Which way an operand lies in shared memory: contiguous along k, or along m (A), n (B).
enum class Major : int { kK = 0, kMN = 1 };

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of this warpgroup's latest groups still run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties registers to this place: the compiler knows nothing of asynchronous products, and would move
// reads above a wait and writes below a fence.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// A tile in shared memory as wgmma reads it under the 128-byte swizzle: blocks of rows of 128
// bytes, each block at a multiple of 1024. `leading` is the distance in bytes between blocks, used
// only where the contiguous direction is m or n; eight rows are 1024 bytes in either direction.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem_address, uint32_t leading = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(leading >> 4) << 16 |
         (smem_address & 0x3FFFF) >> 4;
}

// m64 x kN x k16. `accumulate` false: D = A B.
template <typename In, int kN>
struct Wgmma;

#define FLASH_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_REGS_1 FLASH_R0
#define FLASH_REGS_2 FLASH_REGS_1 ", " FLASH_R1
#define FLASH_REGS_3 FLASH_REGS_2 ", " FLASH_R2
#define FLASH_REGS_4 FLASH_REGS_3 ", " FLASH_R3
#define FLASH_REGS_5 FLASH_REGS_4 ", " FLASH_R4
#define FLASH_REGS_6 FLASH_REGS_5 ", " FLASH_R5
#define FLASH_REGS_7 FLASH_REGS_6 ", " FLASH_R6
#define FLASH_REGS_8 FLASH_REGS_7 ", " FLASH_R7
#define FLASH_REGS_9 FLASH_REGS_8 ", " FLASH_R8
#define FLASH_REGS_10 FLASH_REGS_9 ", " FLASH_R9
#define FLASH_REGS_11 FLASH_REGS_10 ", " FLASH_R10
#define FLASH_REGS_12 FLASH_REGS_11 ", " FLASH_R11
#define FLASH_REGS_13 FLASH_REGS_12 ", " FLASH_R12
#define FLASH_REGS_14 FLASH_REGS_13 ", " FLASH_R13
#define FLASH_REGS_15 FLASH_REGS_14 ", " FLASH_R14
#define FLASH_REGS_16 FLASH_REGS_15 ", " FLASH_R15
#define FLASH_D8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASH_OUT_1 FLASH_D8(0)
#define FLASH_OUT_2 FLASH_OUT_1, FLASH_D8(8)
#define FLASH_OUT_3 FLASH_OUT_2, FLASH_D8(16)
#define FLASH_OUT_4 FLASH_OUT_3, FLASH_D8(24)
#define FLASH_OUT_5 FLASH_OUT_4, FLASH_D8(32)
#define FLASH_OUT_6 FLASH_OUT_5, FLASH_D8(40)
#define FLASH_OUT_7 FLASH_OUT_6, FLASH_D8(48)
#define FLASH_OUT_8 FLASH_OUT_7, FLASH_D8(56)
#define FLASH_OUT_9 FLASH_OUT_8, FLASH_D8(64)
#define FLASH_OUT_10 FLASH_OUT_9, FLASH_D8(72)
#define FLASH_OUT_11 FLASH_OUT_10, FLASH_D8(80)
#define FLASH_OUT_12 FLASH_OUT_11, FLASH_D8(88)
#define FLASH_OUT_13 FLASH_OUT_12, FLASH_D8(96)
#define FLASH_OUT_14 FLASH_OUT_13, FLASH_D8(104)
#define FLASH_OUT_15 FLASH_OUT_14, FLASH_D8(112)
#define FLASH_OUT_16 FLASH_OUT_15, FLASH_D8(120)

// In, its name in PTX, N, N / 16, and the numbers of the operands that follow the accumulators.
#define FLASH_WGMMA_OF(In, type, n, eights, i0, i1, i2, i3, i4, i5, i6)                          \
  template <>                                                                                    \
  struct Wgmma<In, n> {                                                                          \
    template <Major kMajorA, Major kMajorB>                                                      \
    static __device__ __forceinline__ void ss(float (&d)[n / 2], uint64_t a, uint64_t b,         \
                                              bool accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                      \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                   " {" FLASH_REGS_##eights "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4    \
                                            ";\n}"                                               \
                   : FLASH_OUT_##eights                                                          \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)),                          \
                     "n"(static_cast<int>(kMajorA)), "n"(static_cast<int>(kMajorB)));            \
    }                                                                                            \
    template <Major kMajorB>                                                                     \
    static __device__ __forceinline__ void rs(float (&d)[n / 2], const uint32_t (&a)[4],         \
                                              uint64_t b, bool accumulate) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                      \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                   " {" FLASH_REGS_##eights "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 \
                                            ", p, 1, 1, %" #i6 ";\n}"                            \
                   : FLASH_OUT_##eights                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                         \
                     "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorB)));         \
    }                                                                                            \
  };
#define FLASH_WGMMA(...)                        \
  FLASH_WGMMA_OF(bfloat16, "bf16", __VA_ARGS__) \
  FLASH_WGMMA_OF(float16, "f16", __VA_ARGS__)
FLASH_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
FLASH_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
FLASH_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
FLASH_WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
FLASH_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
FLASH_WGMMA(144, 9, 72, 73, 74, 75, 76, 77, 78)
FLASH_WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
FLASH_WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
FLASH_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
FLASH_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_WGMMA
#undef FLASH_WGMMA_OF
#undef FLASH_D8
#undef FLASH_R0
#undef FLASH_R1
#undef FLASH_R2
#undef FLASH_R3
#undef FLASH_R4
#undef FLASH_R5
#undef FLASH_R6
#undef FLASH_R7
#undef FLASH_R8
#undef FLASH_R9
#undef FLASH_R10
#undef FLASH_R11
#undef FLASH_R12
#undef FLASH_R13
#undef FLASH_R14
#undef FLASH_R15
#undef FLASH_REGS_1
#undef FLASH_OUT_1
#undef FLASH_REGS_2
#undef FLASH_OUT_2
#undef FLASH_REGS_3
#undef FLASH_OUT_3
#undef FLASH_REGS_4
#undef FLASH_OUT_4
#undef FLASH_REGS_5
#undef FLASH_OUT_5
#undef FLASH_REGS_6
#undef FLASH_OUT_6
#undef FLASH_REGS_7
#undef FLASH_OUT_7
#undef FLASH_REGS_8
#undef FLASH_OUT_8
#undef FLASH_REGS_9
#undef FLASH_OUT_9
#undef FLASH_REGS_10
#undef FLASH_OUT_10
#undef FLASH_REGS_11
#undef FLASH_OUT_11
#undef FLASH_REGS_12
#undef FLASH_OUT_12
#undef FLASH_REGS_13
#undef FLASH_OUT_13
#undef FLASH_REGS_14
#undef FLASH_OUT_14
#undef FLASH_REGS_15
#undef FLASH_OUT_15
#undef FLASH_REGS_16
#undef FLASH_OUT_16

}  // namespace flash::cuda
