// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Words that others write while the kernel runs: copy engines, peers, the host.

namespace ringattn::cuda::sm90 {

/// What was written before the word is seen by this thread once it sees the word.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

/// Orders this thread's ordinary accesses to global memory before later ones of the copy engine
/// that it issues: what an acquire has made visible is visible to them too.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// Until the word is not 0.
__device__ __forceinline__ void wait_for_arrival(const uint32_t* word) {
  while (load_acquire_system(word) == 0) __nanosleep(64);
}

}  // namespace ringattn::cuda::sm90
