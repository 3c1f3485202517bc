// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "peer_sync/memory_order.cuh"
#include "peer_sync/protocol.h"
#include "peer_sync/spin_wait.cuh"

// The fetching side of the protocol (protocol.h). `between` is called before each further poll.

namespace ringattn::cuda {

/// Waits until the signal is at least `least`. Returns the signal, or `least` where the wait is in
/// vain: callers look at `failed` afterwards.
template <typename Between>
__device__ __forceinline__ uint32_t wait_until_at_least(const uint32_t* signal, uint32_t least,
                                                        const RemoteFetch& fetch, uint32_t phase,
                                                        const Between& between) {
  const PeerSignals& signals = fetch.signals;
  uint32_t value;
#pragma unroll 1
  for (uint32_t polls = 1; (value = load_acquire_system(signal)) < least; ++polls) {
    if (has_failed(fetch.failed, fetch.given_up, polls)) return least;
    // Repeated: a thread block that starts late may overwrite the phase with phase_working.
    if (polls % kPollsPerHostRead == 0 && signals.phase != nullptr) {
      store_relaxed_system(signals.phase, phase);
    }
    between();
    __nanosleep(64);
  }
  return value;
}

/// Waits until every peer has staged `heads` KV heads, or the group has failed. Returns how many
/// heads all peers have staged.
template <typename Between>
__device__ __forceinline__ uint32_t wait_until_staged(const RemoteFetch& fetch, uint32_t heads,
                                                      const Between& between) {
  const PeerSignals& signals = fetch.signals;
  uint32_t least = UINT32_MAX;
#pragma unroll 1
  for (int i = 0; i < signals.num_peers; ++i) {
    least = min(least, wait_until_at_least(signals.staged_by_peer[i], staged_heads(heads), fetch,
                                           signals.phase_until_staged, between));
  }
  return least - kBeingStaged;
}

// The next two are called by one thread for all peers (first 0, threads 1), or by the lanes of a
// warp, each for the peers first, first + threads, ...

/// Waits until the mirrors of `staged`, which peers write last, are set: no peer writes to either
/// any more in this call.
template <typename Between>
__device__ __forceinline__ void wait_until_mirrored(const RemoteFetch& fetch, int first,
                                                    int threads, const Between& between) {
  const PeerSignals& signals = fetch.signals;
#pragma unroll 1
  for (int i = first; i < signals.num_peers; i += threads) {
    if (signals.staged_mirror_by_peer[i] == nullptr) continue;
    wait_until_at_least(signals.staged_mirror_by_peer[i], 1, fetch, signals.phase_until_mirrored,
                        between);
  }
}

/// After everything has been read: clears `staged` and its mirror, then signals to the peers that
/// their blocks have been read.
__device__ __forceinline__ void clear_staged_and_signal_read(const RemoteFetch& fetch, int first,
                                                             int threads) {
  const PeerSignals& signals = fetch.signals;
  if (first == 0 && signals.phase != nullptr) {
    store_relaxed_system(signals.phase, signals.phase_working);
  }
  __threadfence_system();  // reads of all thread blocks come before the signals
  for (int i = first; i < signals.num_peers; i += threads) {
    store_relaxed_system(signals.staged_by_peer[i], 0);
    if (signals.staged_mirror_by_peer[i] == nullptr) continue;
    store_relaxed_system(signals.staged_mirror_by_peer[i], 0);
    store_relaxed_system(signals.read_mirror_by_this_rank[i], 1);
  }
  for (int i = first; i < signals.num_peers; i += threads) {
    store_release_system(signals.read_by_this_rank[i], 1);
  }
}

/// By a warp: waits until all peers have read this rank's block.
__device__ __forceinline__ void wait_until_read(const RemoteFetch& fetch) {
  const PeerSignals& signals = fetch.signals;
  const int lane = threadIdx.x % 32;
  const bool unread =
      lane < signals.num_peers && load_acquire_system(signals.read_by_peer[lane]) == 0;
  if (!__any_sync(0xffffffff, unread)) return;
  if (lane == 0 && signals.phase != nullptr) {
    store_relaxed_system(signals.phase, signals.phase_until_read);
  }
  if (lane < signals.num_peers) {
    wait_for_signal(signals.read_by_peer[lane], fetch.failed, fetch.given_up);
  }
  __syncwarp();
  if (lane == 0 && signals.phase != nullptr) {
    store_relaxed_system(signals.phase, signals.phase_working);
  }
}

}  // namespace ringattn::cuda
