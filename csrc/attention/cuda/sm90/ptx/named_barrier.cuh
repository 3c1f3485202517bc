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

}  // namespace ringattn::cuda::sm90
