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
static_assert(kMaxSignals <= kWarpSize);
constexpr int kInFlight = 8;
constexpr uint32_t kRunPieces = kInFlight * kWarpSize;  // of a plane, by a warp at a time
constexpr int64_t kMostPieces = int64_t{1} << 30;       // of a plane: counted in 32 bits

// Strides in pieces.
struct Source {
  const uint4* data;
  int64_t batch_stride, row_stride, head_stride;
};

struct Launch {
  Source k, v;
  StageParams to;
  uint32_t row_pieces;                      // of one head
  uint32_t rows_per_step, pieces_per_step;  // as far on as the warp's next pieces are
  uint32_t plane_pieces;  // a plane: [rows, D] of one head and batch, keys or values
  uint32_t plane_runs;
  uint32_t planes_per_head;
  uint32_t heads_per_part;
};

// A run of pieces, as many under way at a time as there are.
__device__ __forceinline__ void copy_run(const Launch& launch, uint32_t run, bool writes) {
  const StageParams& to = launch.to;
  const uint32_t plane = run / launch.plane_runs;
  const uint32_t first = (run - plane * launch.plane_runs) * kRunPieces + threadIdx.x % kWarpSize;
  const uint32_t head_and_kind = plane / to.batch, batch = plane - head_and_kind * to.batch;
  const uint32_t kinds = to.keys_only ? 1 : 2;
  const Source& source = head_and_kind % kinds == 0 ? launch.k : launch.v;
  const uint4* const from =
      source.data + batch * source.batch_stride + head_and_kind / kinds * source.head_stride;
  uint4* const into =
      static_cast<uint4*>(to.staged) + int64_t{plane} * to.staged_rows * launch.row_pieces + first;

  uint32_t row = first / launch.row_pieces, in_row = first - row * launch.row_pieces;
  uint4 read[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    if (first + j * kWarpSize < launch.plane_pieces) {
      read[j] = from[row * source.row_stride + in_row];
    }
    row += launch.rows_per_step;
    in_row += launch.pieces_per_step;
    if (in_row >= launch.row_pieces) {
      in_row -= launch.row_pieces;
      ++row;
    }
  }
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    if (first + j * kWarpSize < launch.plane_pieces && writes) into[j * kWarpSize] = read[j];
  }
}

// By a lane for each of the others, when that one has said that it stages. The first to see one in
// another call says so.
__device__ __forceinline__ void look_at_tag(const StageParams& to) {
  const uint32_t place = threadIdx.x, theirs = load_relaxed_system(to.tags.theirs[place]);
  if (theirs == to.tags.own || set_if_zero(to.failed, kInAnotherCall) != 0) return;
  store_relaxed_system(to.tags.unlike, 1 + place + (theirs == kNoCall ? kMaxSignals : 0));
  __threadfence_system();  // the kernel that may begin now must see it
}

// As far as streams have seen.
__device__ __forceinline__ bool has_been_given_up(const StageParams& to) {
  return to.seen != nullptr && load_relaxed_system(to.seen) != 0;
}

// By a thread block of its own: until the others have come as far.
__device__ __forceinline__ void wait_for_others(const StageParams& to) {
  if (threadIdx.x >= kWarpSize) return;
  const bool given_up = has_been_given_up(to);
  if (threadIdx.x == 0) {
    store_relaxed_system(to.phase_shown, to.phase);
    store_relaxed_system(to.calls_shown, ++*to.calls);
  }
  if (threadIdx.x < to.num_awaited) {
    wait_for_word(to.awaited[threadIdx.x], to.failed, to.given_up);
    look_at_tag(to);
  }
  __syncwarp();
  if (threadIdx.x == 0 && given_up) {  // the kernel behind asks for `failed` alone
    store_relaxed_system(to.failed, kGivenUp);
    __threadfence_system();
  }
  __syncwarp();
  let_next_kernel_begin();
}

// The last thread block waits, the others copy, all of them the same heads at a time.
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ Launch launch) {
  const StageParams& to = launch.to;
  wait_for_kernel_before();
  const uint32_t copying = gridDim.x - 1;
  if (blockIdx.x == copying) {
    wait_for_others(to);
    return;
  }
  // Who has given up must not write over what a peer that is only late will read yet. Asked for
  // now, it is known when the first keys have come.
  const uint32_t failure = load_relaxed_system(to.failed);
  const bool given_up = has_been_given_up(to), failed = given_up || failure == kGivenUp;
  // Who has seen one in another call does not wait any more, and may be in the next by now.
  const uint32_t tag = failure == 0 ? to.tags.own : kNoCall;

  // All thread blocks that copy run: nothing else is needed any more.
  if (threadIdx.x < kWarpSize) {
    uint32_t before = 0;
    if (threadIdx.x == 0) before = add_acquire_release(to.blocks_done, 1);
    if (__shfl_sync(0xffffffff, before, 0) == copying - 1) {
      if (threadIdx.x == 0) *to.blocks_done = 0;
      // A stream that waited, last time, was told a little before this word is set. Nobody is told
      // anything before all are there: from then on nothing may be waited for.
      const bool tells = threadIdx.x < to.num_signals && !failed &&
                         wait_for_word(to.taken_back[threadIdx.x], to.failed, to.given_up);
      __syncwarp();
      if (tells) {
        store_relaxed_system(to.taken_back[threadIdx.x], 0);
        store_relaxed_system(to.tags.told[threadIdx.x], tag);
        store_release_system(to.signals[threadIdx.x], kBeingStaged);
        // In a call that comes to something nobody sets it before everything is staged.
        if (to.taken_back_for_streams[threadIdx.x] != nullptr) {
          store_relaxed_system(to.taken_back_for_streams[threadIdx.x], 0);
        }
      }
    }
  }
  // Not before the words are taken back: the next kernel takes them, at its end, for news.
  __syncthreads();
  let_next_kernel_begin();

  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize, warps = copying * kWarps;
  const uint32_t num_heads = to.num_kv_heads;
  const uint32_t head_runs = launch.planes_per_head * launch.plane_runs;
  for (uint32_t head = 0, part = 1, run = warp; head < num_heads; ++part) {
    head = min(head + launch.heads_per_part, num_heads);
    for (; run < head * head_runs; run += warps) copy_run(launch, run, !failed);
    if (to.lateness != 0 && threadIdx.x == 0) {
      const uint32_t random = (blockIdx.x * kStageCounters + part ^ to.lateness) * 2654435761u;
      if (random >> 30 == 0) __nanosleep(random >> 13 & 0x1ffff);
    }
    // Nobody counts who has seen the failure, and so nobody is told. Parts end one after the other:
    // who ends one tells of it before the next one can end.
    if (__syncthreads_or(failed)) return;
    if (is_last_block(copying, to.blocks_done + part) && threadIdx.x < to.num_signals) {
      store_release_system(to.signals[threadIdx.x], staged_heads(head));
      if (head == num_heads && to.signals_for_streams[threadIdx.x] != nullptr) {
        store_release_system(to.signals_for_streams[threadIdx.x], tag);
      }
    }
  }
}

Source in_pieces(const StageSource& x) {
  return {static_cast<const uint4*>(x.data), x.batch_stride / kStagePiece,
          x.row_stride / kStagePiece, x.head_stride / kStagePiece};
}

}  // namespace

cudaError_t stage(const StageParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;

  Launch launch;
  launch.to = params;
  launch.to.batch = std::max(params.batch, 1);
  launch.k = in_pieces(params.k);
  launch.v = in_pieces(params.v);
  const int64_t row_pieces = ceil_div(params.row_bytes, kStagePiece);
  const int64_t plane_pieces = params.batch > 0 ? params.rows * row_pieces : 0;
  const int64_t planes_per_head = int64_t{params.keys_only ? 1 : 2} * launch.to.batch;
  const int64_t plane_runs = ceil_div(plane_pieces, kRunPieces);
  const int64_t runs = params.num_kv_heads * planes_per_head * plane_runs;
  if (plane_pieces > kMostPieces || runs > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int64_t most = params.kernel_fetches ? beside_others(multiprocessors) : multiprocessors;
  const int64_t copying = std::clamp<int64_t>(ceil_div(runs, kWarps), 1, most);
  // What all warps copy in one round is there at the same time: to tell of less would not be to
  // tell sooner.
  const int64_t rounds = ceil_div(runs, copying * kWarps);
  const int64_t parts = std::clamp<int64_t>(rounds, 1, kMostStagedParts);
  launch.row_pieces = static_cast<uint32_t>(row_pieces);
  launch.rows_per_step = kWarpSize / std::max(launch.row_pieces, 1u);
  launch.pieces_per_step = kWarpSize % std::max(launch.row_pieces, 1u);
  launch.plane_pieces = static_cast<uint32_t>(plane_pieces);
  launch.plane_runs = static_cast<uint32_t>(plane_runs);
  launch.planes_per_head = static_cast<uint32_t>(planes_per_head);
  launch.heads_per_part = static_cast<uint32_t>(ceil_div(params.num_kv_heads, parts));

  return cuda::launch<stage_kernel>(launch, copying + 1, kThreads, params.follows_closely, stream);
}

}  // namespace ringattn::cuda
