// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/system_memory.cuh"

// Keys that arrive while the kernel runs.

namespace ringattn::cuda::sm90 {

/// What the copying thread knows to have arrived: of the slice of KV heads that it is at, a bit for
/// each segment. Tiles go through heads in order, so a slice does not come back.
template <int kSegments>
struct SeenArrivals {
  static_assert(kSegments <= 32);
  uint32_t segments = 0;
  int slice = -1;

  __device__ __forceinline__ void go_to(int next_slice) {
    if (next_slice != slice) segments = 0;
    slice = next_slice;
  }

  /// Until the slice has arrived.
  __device__ __forceinline__ void wait_for(int segment, const uint32_t* arrivals) {
    if (arrivals == nullptr || (segments >> segment & 1) != 0) return;
    wait_for_arrival(arrivals + slice);
    fence_async_global();
    segments |= 1u << segment;
  }
};

/// Called by the warps that bring keys and values when they have brought all and seen all their
/// arrivals. The last one sets the words back.
template <bool kArriving>
__device__ __forceinline__ void finish(const LaunchWords& words) {
  if (words.data == nullptr) return;
  const int lane = threadIdx.x % 32;
  unsigned done = 0;
  if (lane == 0) {
    __threadfence();
    done = atomicAdd(words.data + LaunchWords::kBlocksDone, 1) + 1;
    __threadfence();
  }
  if (__shfl_sync(0xffffffff, done, 0) != 2 * gridDim.x) return;
  if (lane < LaunchWords::kFirstArrival) words.data[lane] = 0;
  if constexpr (kArriving) {
    for (int i = lane; i < words.num_arrivals; i += 32) {
      wait_for_arrival(words.arrivals() + i);  // one that nobody needed may still be on its way
      words.arrivals()[i] = 0;
    }
  }
}

}  // namespace ringattn::cuda::sm90
