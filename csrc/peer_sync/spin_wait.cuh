// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "peer_sync/memory_order.cuh"
#include "peer_sync/protocol.h"

// Waits of one thread for a value in global memory.

namespace ringattn::cuda {

/// Waits until the counter is at least `count`.
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t count) {
  while (load_acquire(counter) < count) __nanosleep(64);
}

/// Polls between two reads of host memory: about a millisecond.
constexpr uint32_t kPollsPerHostRead = 1024;

/// Whether the group has failed, for a wait that has polled so often: `failed` is set. Every
/// kPollsPerHostRead-th poll reads given_up and, where that is not 0, sets `failed`.
__device__ __forceinline__ bool has_failed(uint32_t* failed, const uint32_t* given_up,
                                           uint32_t polls) {
  if (load_relaxed_system(failed) != 0) return true;
  // Host memory is far.
  if (polls % kPollsPerHostRead != 0 || given_up == nullptr || load_relaxed_system(given_up) == 0) {
    return false;
  }
  store_relaxed_system(failed, kGivenUp);
  return true;
}

/// Waits until the signal is not 0. False: the group has failed, the signal will not come.
__device__ __forceinline__ bool wait_for_signal(const uint32_t* signal, uint32_t* failed,
                                                const uint32_t* given_up) {
#pragma unroll 1
  for (uint32_t polls = 1; load_acquire_system(signal) == 0; ++polls) {
    if (has_failed(failed, given_up, polls)) return false;
    __nanosleep(64);
  }
  return true;
}

}  // namespace ringattn::cuda
