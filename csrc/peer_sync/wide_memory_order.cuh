// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The accesses of memory_order.cuh to 64-bit values: one such value carries two that belong
// together.

namespace ringattn::cuda {

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

}  // namespace ringattn::cuda
