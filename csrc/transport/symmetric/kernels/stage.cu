// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "peer_sync/dependent_launch.cuh"
#include "peer_sync/last_block.cuh"
#include "peer_sync/launch.cuh"
#include "peer_sync/memory_order.cuh"
#include "peer_sync/protocol.h"
#include "peer_sync/spin_wait.cuh"
#include "transport/symmetric/kernels/stage.h"

namespace ringattn::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
static_assert(kMaxPeers <= kWarpSize);
constexpr int kInFlight = 8;
constexpr uint32_t kChunkVectors = kInFlight * kWarpSize;  // of a plane, copied by a warp at a time
constexpr int64_t kMaxPlaneVectors = int64_t{1} << 30;     // counted in 32 bits

// Strides in vectors.
struct Source {
  const uint4* data;
  int64_t batch_stride, row_stride, head_stride;
};

struct Launch {
  Source k, v;
  StageParams params;
  uint32_t row_vectors;                      // of one head
  uint32_t rows_per_step, vectors_per_step;  // from a lane's vector to its next one
  uint32_t plane_vectors;  // a plane: [rows, D] of one head and batch entry, keys or values
  uint32_t plane_chunks;
  uint32_t planes_per_head;
  uint32_t heads_per_group;
};

// Copies a chunk, all of its vectors in flight at once. `writes`: false where it only reads.
__device__ __forceinline__ void copy_chunk(const Launch& launch, uint32_t chunk, bool writes) {
  const StageParams& params = launch.params;
  const uint32_t plane = chunk / launch.plane_chunks;
  const uint32_t first =
      (chunk - plane * launch.plane_chunks) * kChunkVectors + threadIdx.x % kWarpSize;
  const uint32_t head_and_kind = plane / params.batch, batch = plane - head_and_kind * params.batch;
  const uint32_t kinds = params.keys_only ? 1 : 2;
  const Source& source = head_and_kind % kinds == 0 ? launch.k : launch.v;
  const uint4* const from =
      source.data + batch * source.batch_stride + head_and_kind / kinds * source.head_stride;
  uint4* const into = static_cast<uint4*>(params.staged) +
                      int64_t{plane} * params.staged_rows * launch.row_vectors + first;

  uint32_t row = first / launch.row_vectors, in_row = first - row * launch.row_vectors;
  uint4 read[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    if (first + j * kWarpSize < launch.plane_vectors) {
      read[j] = from[row * source.row_stride + in_row];
    }
    row += launch.rows_per_step;
    in_row += launch.vectors_per_step;
    if (in_row >= launch.row_vectors) {
      in_row -= launch.row_vectors;
      ++row;
    }
  }
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    if (first + j * kWarpSize < launch.plane_vectors && writes) into[j * kWarpSize] = read[j];
  }
}

// By the lane of each peer, once that peer is staging. The first lane that reads another tag
// reports it.
__device__ __forceinline__ void check_tag(const StageParams& params) {
  const uint32_t peer = threadIdx.x, tag = load_relaxed_system(params.tags.by_peer[peer]);
  if (tag == params.tags.value || set_if_zero(params.failed, kCallMismatch) != 0) return;
  store_relaxed_system(params.tags.mismatch, 1 + peer + (tag == kMismatchTag ? kMaxPeers : 0));
  __threadfence_system();  // visible to the kernel that is triggered next
}

// Reads the copy of given_up that a stream has made.
__device__ __forceinline__ bool has_been_given_up(const StageParams& params) {
  return params.given_up_copy != nullptr && load_relaxed_system(params.given_up_copy) != 0;
}

// One thread block, which copies nothing, waits here until all peers are staging. Then it triggers
// the next kernel.
__device__ __forceinline__ void wait_for_peers(const StageParams& params) {
  if (threadIdx.x >= kWarpSize) return;
  const bool given_up = has_been_given_up(params);
  if (threadIdx.x == 0) {
    store_relaxed_system(params.host_phase, params.phase);
    store_relaxed_system(params.host_calls, ++*params.calls);
  }
  if (threadIdx.x < params.num_awaited) {
    wait_for_signal(params.staged_by_peer[threadIdx.x], params.failed, params.given_up);
    check_tag(params);
  }
  __syncwarp();
  if (threadIdx.x == 0 && given_up) {  // the next kernel reads `failed` alone
    store_relaxed_system(params.failed, kGivenUp);
    __threadfence_system();
  }
  __syncwarp();
  trigger_next_kernel();
}

// The last thread block waits, the others copy, all of them one group of heads after the other.
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ Launch launch) {
  const StageParams& params = launch.params;
  wait_for_previous_kernel();
  const uint32_t copying = gridDim.x - 1;
  if (blockIdx.x == copying) {
    wait_for_peers(params);
    return;
  }
  // A rank that has given up must not write over a block that a late peer may still read. Loaded
  // early, so that the loads overlap with those of the first keys.
  const uint32_t failure = load_relaxed_system(params.failed);
  const bool given_up = has_been_given_up(params), failed = given_up || failure == kGivenUp;
  // A rank that has detected a mismatch does not wait any more, and may be one call ahead of its
  // peers: the tag of its present call could equal that of theirs.
  const uint32_t tag = failure == 0 ? params.tags.value : kMismatchTag;

  // The last copying thread block to come here knows that all of them run, and that the block will
  // be staged whatever happens.
  if (threadIdx.x < kWarpSize) {
    uint32_t before = 0;
    if (threadIdx.x == 0) before = add_acquire_release(params.blocks_done, 1);
    if (__shfl_sync(0xffffffff, before, 0) == copying - 1) {
      if (threadIdx.x == 0) *params.blocks_done = 0;
      // read_by_peer may still be in flight where a stream waited for its mirror. The warp waits
      // for those of all peers before it signals any: after that this rank must not wait.
      const bool signals =
          threadIdx.x < params.num_peers && !failed &&
          wait_for_signal(params.read_by_peer[threadIdx.x], params.failed, params.given_up);
      __syncwarp();
      if (signals) {
        store_relaxed_system(params.read_by_peer[threadIdx.x], 0);
        store_relaxed_system(params.tags.by_this_rank[threadIdx.x], tag);
        store_release_system(params.staged_by_this_rank[threadIdx.x], kBeingStaged);
        // After kBeingStaged, which peers wait for. Clearing late is safe: no peer sets it again
        // before everything is staged, unless the call fails.
        if (params.read_mirror_by_peer[threadIdx.x] != nullptr) {
          store_relaxed_system(params.read_mirror_by_peer[threadIdx.x], 0);
        }
      }
    }
  }
  // After read_by_peer is cleared: the next kernel waits for it at its end.
  __syncthreads();
  trigger_next_kernel();

  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize, warps = copying * kWarps;
  const uint32_t num_heads = params.num_kv_heads;
  const uint32_t head_chunks = launch.planes_per_head * launch.plane_chunks;
  for (uint32_t head = 0, group = 1, chunk = warp; head < num_heads; ++group) {
    head = min(head + launch.heads_per_group, num_heads);
    for (; chunk < head * head_chunks; chunk += warps) copy_chunk(launch, chunk, !failed);
    if (params.delay_seed != 0 && threadIdx.x == 0) {
      const uint32_t random =
          (blockIdx.x * kStageCounters + group ^ params.delay_seed) * 2654435761u;
      if (random >> 30 == 0) __nanosleep(random >> 13 & 0x1ffff);
    }
    // After a failure, thread blocks stop counting, so no completion is signalled. Groups end one
    // after the other: the thread block that ends one signals it before the next one can end.
    if (__syncthreads_or(failed)) return;
    if (is_last_block(copying, params.blocks_done + group) && threadIdx.x < params.num_peers) {
      store_release_system(params.staged_by_this_rank[threadIdx.x], staged_heads(head));
      if (head == num_heads && params.staged_mirror_by_this_rank[threadIdx.x] != nullptr) {
        store_release_system(params.staged_mirror_by_this_rank[threadIdx.x], tag);
      }
    }
  }
}

// What stage_kernel signals, without shared counters. The stream that fetches shows its phase, this
// kernel shows none.
__global__ void __launch_bounds__(kWarpSize)
    signal_kernel(const __grid_constant__ StageParams params) {
  const uint32_t failure = load_relaxed_system(params.failed);
  const bool failed = has_been_given_up(params) || failure == kGivenUp;
  const uint32_t tag = failure == 0 ? params.tags.value : kMismatchTag;
  if (threadIdx.x == 0) store_relaxed_system(params.host_calls, ++*params.calls);
  const bool signals =
      threadIdx.x < params.num_peers && !failed &&
      wait_for_signal(params.read_by_peer[threadIdx.x], params.failed, params.given_up);
  __syncwarp();
  if (!signals) return;
  store_relaxed_system(params.read_by_peer[threadIdx.x], 0);
  store_relaxed_system(params.read_mirror_by_peer[threadIdx.x], 0);
  store_relaxed_system(params.tags.by_this_rank[threadIdx.x], tag);
  store_release_system(params.staged_by_this_rank[threadIdx.x], staged_heads(params.num_kv_heads));
  store_release_system(params.staged_mirror_by_this_rank[threadIdx.x], tag);
}

Source in_vectors(const StageSource& x) {
  return {static_cast<const uint4*>(x.data), x.batch_stride / kVectorBytes,
          x.row_stride / kVectorBytes, x.head_stride / kVectorBytes};
}

}  // namespace

cudaError_t stage(const StageParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;

  Launch launch;
  launch.params = params;
  launch.params.batch = std::max(params.batch, 1);
  launch.k = in_vectors(params.k);
  launch.v = in_vectors(params.v);
  const int64_t row_vectors = ceil_div(params.row_bytes, kVectorBytes);
  const int64_t plane_vectors = params.batch > 0 ? params.rows * row_vectors : 0;
  const int64_t planes_per_head = int64_t{params.keys_only ? 1 : 2} * launch.params.batch;
  const int64_t plane_chunks = ceil_div(plane_vectors, kChunkVectors);
  const int64_t chunks = params.num_kv_heads * planes_per_head * plane_chunks;
  if (plane_vectors > kMaxPlaneVectors || chunks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int64_t max_copying =
      params.kernel_fetches ? num_copying_multiprocessors(multiprocessors) : multiprocessors;
  const int64_t copying = std::clamp<int64_t>(ceil_div(chunks, kWarps), 1, max_copying);
  // What all warps copy in one round is staged at the same time: smaller groups would not be
  // signalled sooner.
  const int64_t rounds = ceil_div(chunks, copying * kWarps);
  const int64_t groups = std::clamp<int64_t>(rounds, 1, kMaxHeadGroups);
  launch.row_vectors = static_cast<uint32_t>(row_vectors);
  launch.rows_per_step = kWarpSize / std::max(launch.row_vectors, 1u);
  launch.vectors_per_step = kWarpSize % std::max(launch.row_vectors, 1u);
  launch.plane_vectors = static_cast<uint32_t>(plane_vectors);
  launch.plane_chunks = static_cast<uint32_t>(plane_chunks);
  launch.planes_per_head = static_cast<uint32_t>(planes_per_head);
  launch.heads_per_group = static_cast<uint32_t>(ceil_div(params.num_kv_heads, groups));

  return cuda::launch<stage_kernel>(launch, copying + 1, kThreads, params.follows_closely, stream);
}

cudaError_t signal_staged(const StageParams& params, cudaStream_t stream) {
  return cuda::launch<signal_kernel>(params, 1, kWarpSize, /*dependent=*/false, stream);
}

}  // namespace ringattn::cuda
