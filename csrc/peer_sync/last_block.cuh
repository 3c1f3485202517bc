// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "peer_sync/memory_order.cuh"

namespace ringattn::cuda {

/// Whether this thread block is the last of `blocks` that calls it. What the others wrote before
/// their calls is visible to the last one. `counter` is 0 before and after.
__device__ __forceinline__ bool is_last_block(uint32_t blocks, uint32_t* counter) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = add_acquire_release(counter, 1) == blocks - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  return is_last;
}

}  // namespace ringattn::cuda
