// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "device_emulator.h"

// In place of csrc/peer_sync/memory_order.cuh where a test emulates device code.

namespace ringattn::cuda {

/// Called before each release store.
inline std::function<void(const uint32_t* address, uint32_t value)> on_store_release;
/// Called before each release store of 64 bits.
inline std::function<void(const uint64_t* address, uint64_t value)> on_wide_store_release;

inline uint32_t load_acquire(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline uint32_t set_if_zero(uint32_t* address, uint32_t value) {
  uint32_t before = 0;
  __atomic_compare_exchange_n(address, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return before;
}
inline uint32_t load_relaxed_system(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline uint32_t load_acquire_system(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_relaxed_system(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
inline void store_release_system(uint32_t* address, uint32_t value) {
  if (on_store_release) on_store_release(address, value);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline uint32_t add_acquire_release(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline uint64_t load_acquire_system(const uint64_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release_system(uint64_t* address, uint64_t value) {
  if (on_wide_store_release) on_wide_store_release(address, value);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

}  // namespace ringattn::cuda
