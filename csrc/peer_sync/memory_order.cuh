// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Words of global memory that others write and read while a kernel runs: thread blocks of this
// device, or (..._system) other devices and the host too.

namespace ringattn::cuda {

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

/// Who sees the sum with load_acquire sees what this thread, and those that it has synchronised
/// with, did before; and, with the value before, who adds.
__device__ __forceinline__ void add_release(uint32_t* word, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

/// Sets a word that is 0; the value before.
__device__ __forceinline__ uint32_t set_if_zero(uint32_t* word, uint32_t value) {
  return atomicCAS(word, 0u, value);
}

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

}  // namespace ringattn::cuda
