// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sixteen named barriers of a thread block; __syncthreads uses number 0. A phase ends when
// `threads` threads have arrived, including those that do not wait.

namespace ringattn::cuda::sm90 {

__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ringattn::cuda::sm90
