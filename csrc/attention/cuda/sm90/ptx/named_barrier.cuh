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

/// Behind the instructions that make x: an arrival without operands is moved by the compiler, which
/// keeps it only between the waits for products around it.
///
/// Note: nothing is greater than infinity, so the barrier is always the one asked for; the compiler
/// does not see that.
__device__ __forceinline__ void named_barrier_arrive_behind(const float (&x)[2], int barrier,
                                                            int threads) {
  asm volatile(
      "{ .reg .pred p; .reg .b32 b; setp.gt.f32 p, %2, 0f7F800000; "
      "setp.gt.or.f32 p, %3, 0f7F800000, p; selp.b32 b, 15, %0, p; bar.arrive b, %1; }" ::"r"(
          barrier),
      "r"(threads), "f"(x[0]), "f"(x[1])
      : "memory");
}

}  // namespace ringattn::cuda::sm90
