// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "peer_sync/dependent_launch.cuh"
#include "peer_sync/last_block.cuh"
#include "peer_sync/launch.cuh"
#include "peer_sync/memory_order.cuh"
#include "peer_sync/peer_signals.cuh"
#include "peer_sync/protocol.h"
#include "transport/symmetric/kernels/fetch.h"
#include "transport/symmetric/kernels/stage.h"

namespace ringattn::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kThreads = 512;
constexpr int kInFlight = 8;
constexpr uint32_t kHeads = 1;  // staged by each peer

__device__ __forceinline__ void copy_vectors(const FetchParams& params) {
  const auto* const from = static_cast<const uint4*>(params.from);
  auto* const to = static_cast<uint4*>(params.to);
  const int64_t vectors = params.bytes / kVectorBytes, rest = params.bytes % kVectorBytes;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < vectors;
       first += kInFlight * stride) {
    uint4 read[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * stride < vectors) read[j] = from[first + j * stride];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * stride < vectors) to[first + j * stride] = read[j];
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < rest) {
    reinterpret_cast<unsigned char*>(to + vectors)[threadIdx.x] =
        reinterpret_cast<const unsigned char*>(from + vectors)[threadIdx.x];
  }
}

// Each thread block waits for what peers are staging already when this launch starts. Only the
// first warp of the last thread block waits for what takes longer: that peers have read.
__global__ void __launch_bounds__(kThreads)
    fetch_kernel(const __grid_constant__ FetchParams params) {
  const RemoteFetch& remote_fetch = params.remote_fetch;
  const auto no_work = [] {};
  bool failed = false;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0 && remote_fetch.signals.phase != nullptr) {
      store_relaxed_system(remote_fetch.signals.phase, remote_fetch.signals.phase_working);
    }
    wait_until_staged(remote_fetch, kHeads, no_work);
    failed = load_relaxed_system(remote_fetch.failed) != 0;  // the owner and its memory may be gone
    if (remote_fetch.delay_seed != 0) {
      const uint32_t random = (blockIdx.x ^ remote_fetch.delay_seed) * 2654435761u;
      __nanosleep(random >> 13 & 0x1ffff);
    }
  }
  if (!__syncthreads_or(failed)) copy_vectors(params);

  const bool is_last =
      is_last_block(gridDim.x, remote_fetch.scratch.data + LaunchScratch::kWarpsDone);
  if (!is_last || threadIdx.x >= kWarpSize) return;
  const int lane = static_cast<int>(threadIdx.x);
  wait_until_mirrored(remote_fetch, lane, kWarpSize, no_work);
  __syncwarp();  // no lane shows phase_until_mirrored any more
  clear_staged_and_signal_read(remote_fetch, lane, kWarpSize);
  __syncwarp();
  wait_until_read(remote_fetch);
  wait_for_previous_kernel();  // so that what follows this launch also follows that kernel
}

}  // namespace

void load_fetch() { supports_dependent_launch<fetch_kernel>(); }

cudaError_t fetch(const FetchParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;
  const int64_t blocks = ceil_div(params.bytes, int64_t{kVectorBytes} * kThreads);
  return launch<fetch_kernel>(
      params, std::clamp<int64_t>(blocks, 1, num_copying_multiprocessors(multiprocessors)),
      kThreads, params.remote_fetch.follows_staging, stream);
}

}  // namespace ringattn::cuda
