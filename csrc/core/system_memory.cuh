// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Global memory that other devices and the host write and read while a kernel runs.

namespace ringattn::cuda {

__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/// Who sees the value sees what this thread, and those that it has synchronised with, did before.
__device__ __forceinline__ void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/// A word of this device. Gives the value before; who adds later sees what this thread, and those
/// that it has synchronised with, did before.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

/// Until it is not 0, or `failed` is not.
__device__ __forceinline__ void wait_for_word(const uint32_t* word, const uint32_t* failed) {
  while (load_acquire_system(word) == 0 && load_relaxed_system(failed) == 0) __nanosleep(64);
}

}  // namespace ringattn::cuda
