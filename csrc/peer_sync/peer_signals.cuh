// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "peer_sync/memory_order.cuh"
#include "peer_sync/protocol.h"
#include "peer_sync/spin_wait.cuh"

// What a kernel that reads from other devices hears from them, and tells them. `between` is called
// again and again by who waits.

namespace ringattn::cuda {

/// Until a word is at least so much; what it is. `least`, too, where calls come to nothing.
template <typename Between>
__device__ __forceinline__ uint32_t wait_for_least(const uint32_t* word, uint32_t least,
                                                   const Bringing& bringing, uint32_t phase,
                                                   const Between& between) {
  const Notices& notices = bringing.notices;
  uint32_t value;
#pragma unroll 1
  for (uint32_t looks = 1; (value = load_acquire_system(word)) < least; ++looks) {
    if (has_failed(bringing.failed, bringing.given_up, looks)) return least;
    // Again and again: a thread block that comes late may say meanwhile that the launch begins.
    if (looks % kLong == 0 && notices.phase != nullptr) store_relaxed_system(notices.phase, phase);
    between();
    __nanosleep(64);
  }
  return value;
}

/// Until every peer has staged so many heads, or calls come to nothing; how many all of them have.
template <typename Between>
__device__ __forceinline__ uint32_t wait_until_staged(const Bringing& bringing, uint32_t heads,
                                                      const Between& between) {
  const Notices& notices = bringing.notices;
  uint32_t least = UINT32_MAX;
#pragma unroll 1
  for (int i = 0; i < notices.num_peers; ++i) {
    least = min(least, wait_for_least(notices.staged[i], staged_heads(heads), bringing,
                                      notices.phase_bringing, between));
  }
  return least - kBeingStaged;
}

// What follows is done by a thread for all peers (first 0, threads 1), or by the lanes of a warp
// for one peer after the other each, from their own number on.

/// All has been staged, and streams have been told so, too: that comes last, and may be under way
/// still. Nobody will write these words any more.
template <typename Between>
__device__ __forceinline__ void wait_until_told(const Bringing& bringing, int first, int threads,
                                                const Between& between) {
  const Notices& notices = bringing.notices;
#pragma unroll 1
  for (int i = first; i < notices.num_peers; i += threads) {
    if (notices.staged_for_streams[i] == nullptr) continue;
    wait_for_least(notices.staged_for_streams[i], 1, bringing, notices.phase_told, between);
  }
}

/// Then, all having been read: this device takes back the words that said that it may be, and tells
/// the peers.
__device__ __forceinline__ void give_notice(const Bringing& bringing, int first, int threads) {
  const Notices& notices = bringing.notices;
  if (first == 0 && notices.phase != nullptr) {
    store_relaxed_system(notices.phase, notices.phase_working);
  }
  __threadfence_system();  // what all thread blocks have read was read before anybody is told
  for (int i = first; i < notices.num_peers; i += threads) {
    store_relaxed_system(notices.staged[i], 0);
    if (notices.staged_for_streams[i] == nullptr) continue;
    store_relaxed_system(notices.staged_for_streams[i], 0);
    store_relaxed_system(notices.read_for_streams[i], 1);
  }
  for (int i = first; i < notices.num_peers; i += threads) {
    store_release_system(notices.read[i], 1);
  }
}

/// By a warp: until the others have read what is here.
__device__ __forceinline__ void wait_until_read(const Bringing& bringing) {
  const Notices& notices = bringing.notices;
  const int lane = threadIdx.x % 32;
  const bool unread = lane < notices.num_peers && load_acquire_system(notices.read_here[lane]) == 0;
  if (!__any_sync(0xffffffff, unread)) return;
  if (lane == 0 && notices.phase != nullptr) {
    store_relaxed_system(notices.phase, notices.phase_waiting);
  }
  if (lane < notices.num_peers) {
    wait_for_word(notices.read_here[lane], bringing.failed, bringing.given_up);
  }
  __syncwarp();
  if (lane == 0 && notices.phase != nullptr) {
    store_relaxed_system(notices.phase, notices.phase_working);
  }
}

}  // namespace ringattn::cuda
