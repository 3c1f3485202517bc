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
constexpr uint32_t kHeads = 1;  // that peers stage

__device__ __forceinline__ void copy_pieces(const FetchParams& params) {
  const auto* const from = static_cast<const uint4*>(params.from);
  auto* const to = static_cast<uint4*>(params.to);
  const int64_t pieces = params.bytes / kStagePiece, rest = params.bytes % kStagePiece;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < pieces;
       first += kInFlight * stride) {
    uint4 read[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * stride < pieces) read[j] = from[first + j * stride];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * stride < pieces) to[first + j * stride] = read[j];
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < rest) {
    reinterpret_cast<unsigned char*>(to + pieces)[threadIdx.x] =
        reinterpret_cast<const unsigned char*>(from + pieces)[threadIdx.x];
  }
}

// Each thread block waits for what other devices are staging as this launch begins; for what takes
// longer, that they have read, only the first warp of the one that is done last.
__global__ void __launch_bounds__(kThreads)
    fetch_kernel(const __grid_constant__ FetchParams params) {
  const Bringing& bringing = params.bringing;
  const auto nothing = [] {};
  bool failed = false;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0 && bringing.notices.phase != nullptr) {
      store_relaxed_system(bringing.notices.phase, bringing.notices.phase_working);
    }
    wait_until_staged(bringing, kHeads, nothing);
    failed = load_relaxed_system(bringing.failed) != 0;  // its owner may be gone, and the memory
    if (bringing.lateness != 0) {
      const uint32_t random = (blockIdx.x ^ bringing.lateness) * 2654435761u;
      __nanosleep(random >> 13 & 0x1ffff);
    }
  }
  if (!__syncthreads_or(failed)) copy_pieces(params);

  const bool is_last = is_last_block(gridDim.x, bringing.words.data + LaunchWords::kWarpsDone);
  if (!is_last || threadIdx.x >= kWarpSize) return;
  const int lane = static_cast<int>(threadIdx.x);
  wait_until_told(bringing, lane, kWarpSize, nothing);
  __syncwarp();  // nobody shows any more that it waits for that
  give_notice(bringing, lane, kWarpSize);
  __syncwarp();
  wait_until_read(bringing);
  wait_for_kernel_before();  // what follows this launch follows that kernel, too
}

}  // namespace

void load_fetch() { can_be_early<fetch_kernel>(); }

cudaError_t fetch(const FetchParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;
  const int64_t blocks = ceil_div(params.bytes, int64_t{kStagePiece} * kThreads);
  return launch<fetch_kernel>(params,
                              std::clamp<int64_t>(blocks, 1, beside_others(multiprocessors)),
                              kThreads, params.bringing.follows_staging, stream);
}

}  // namespace ringattn::cuda
