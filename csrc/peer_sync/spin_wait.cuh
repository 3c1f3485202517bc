// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "peer_sync/memory_order.cuh"
#include "peer_sync/protocol.h"

// Waiting for words of global memory.

namespace ringattn::cuda {

/// Until so many have been counted.
__device__ __forceinline__ void wait_for_count(const uint32_t* word, uint32_t count) {
  while (load_acquire(word) < count) __nanosleep(64);
}

constexpr uint32_t kLong = 1024;  // looks: a millisecond, about

/// For who has waited for so many looks: whether to go on in vain (Bringing::failed, given_up).
__device__ __forceinline__ bool has_failed(uint32_t* failed, const uint32_t* given_up,
                                           uint32_t looks) {
  if (load_relaxed_system(failed) != 0) return true;
  // The host's word is far.
  if (looks % kLong != 0 || given_up == nullptr || load_relaxed_system(given_up) == 0) {
    return false;
  }
  store_relaxed_system(failed, kGivenUp);
  return true;
}

/// Until it is not 0, or the host has given up: false.
__device__ __forceinline__ bool wait_for_word(const uint32_t* word, uint32_t* failed,
                                              const uint32_t* given_up) {
#pragma unroll 1
  for (uint32_t looks = 1; load_acquire_system(word) == 0; ++looks) {
    if (has_failed(failed, given_up, looks)) return false;
    __nanosleep(64);
  }
  return true;
}

}  // namespace ringattn::cuda
