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

/// Only if `condition`, which is the same in all threads.
///
/// Note: the condition is inside the asm, as the compiler would serialise products in flight around
/// a branch.
__device__ __forceinline__ void named_barrier_wait_if(bool condition, int barrier, int threads) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p bar.sync %0, %1; }" ::"r"(barrier),
               "r"(threads), "r"(int{condition})
               : "memory");
}

__device__ __forceinline__ void named_barrier_arrive_if(bool condition, int barrier, int threads) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p bar.arrive %0, %1; }" ::"r"(barrier),
               "r"(threads), "r"(int{condition})
               : "memory");
}

}  // namespace ringattn::cuda::sm90
