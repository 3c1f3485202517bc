// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/system_memory.cuh"

// Global memory that other thread blocks write and read while the kernel runs.

namespace ringattn::cuda::sm90 {

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

/// Who sees the sum with load_acquire sees what this thread, and those that it has synchronised
/// with, did before.
__device__ __forceinline__ void add_release(uint32_t* word, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/// Orders this thread's ordinary accesses to global memory and those of the copy engine that it
/// issues, earlier ones before later ones: what an acquire has made visible is visible to the
/// engine. What the engine has stored needs none: its completion is one (wait_for_stores).
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// Until so many have been counted.
__device__ __forceinline__ void wait_for_count(const uint32_t* word, uint32_t count) {
  while (load_acquire(word) < count) __nanosleep(64);
}

}  // namespace ringattn::cuda::sm90
