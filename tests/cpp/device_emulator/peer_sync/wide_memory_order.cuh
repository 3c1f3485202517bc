// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

// In place of csrc/peer_sync/wide_memory_order.cuh where a test emulates device code.

namespace ringattn::cuda {

/// Called before each release store of 64 bits.
inline std::function<void(const uint64_t* address, uint64_t value)> on_wide_store_release;

inline uint64_t load_acquire_system(const uint64_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release_system(uint64_t* address, uint64_t value) {
  if (on_wide_store_release) on_wide_store_release(address, value);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

}  // namespace ringattn::cuda
