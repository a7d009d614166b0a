// Counters in global memory by which blocks take turns (sm80 and later): ld.acquire, red.release.
#pragma once

namespace flash::cuda {

// Waits until the counter has reached `turn`. Called by one thread; a block barrier afterwards
// passes what it has seen on to the others.
__device__ __forceinline__ void wait_for_turn(const int* counter, int turn) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < turn);
}

// Passes the turn on. Called by one thread, after a block barrier behind everybody's additions.
__device__ __forceinline__ void pass_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace flash::cuda
