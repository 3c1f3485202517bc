// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sixteen barriers of a thread block; __syncthreads is number 0. A phase ends when `threads`
// threads have come, those that wait and those that only arrive taken together.

namespace ringattn::cuda::sm90 {

__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Waits, and says whether any of the threads, all of which wait here, has come with true.
__device__ __forceinline__ bool named_barrier_any(bool mine, int barrier, int threads) {
  int any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; "
      "selp.s32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(barrier), "r"(threads)
      : "memory");
  return any != 0;
}

}  // namespace ringattn::cuda::sm90
