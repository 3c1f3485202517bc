// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "core/global_words.cuh"
#include "core/kernel_order.cuh"
#include "transport/cuda/stage.h"

namespace ringattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;
constexpr int64_t kMostBlocks = 1024;              // of one plane
constexpr int64_t kMostPlanes = 65535;             // at once: gridDim.y
constexpr int64_t kMostPieces = int64_t{1} << 30;  // counted in 32 bits, a few steps past the end

// Strides in pieces.
struct Source {
  const uint4* data;
  int64_t batch_stride, row_stride, head_stride;
};

struct Launch {
  Source k, v;
  StageParams to;
  uint32_t pieces_per_row;  // of one head
  int planes;
};

// blockIdx.y and its loop: a [rows, D] of one head and batch, keys or values; blockIdx.x and its
// loop: pieces of it, a few of each thread under way at a time.
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ Launch launch) {
  const StageParams& to = launch.to;
  wait_for_kernel_before();
  // Who has given up must not write over what a peer that is only late will read yet. Asked for
  // now, it is known when the first keys have come.
  const uint32_t failed = load_relaxed_system(to.failed);
  const uint32_t row_pieces = launch.pieces_per_row;
  const uint32_t pieces = to.rows * row_pieces;
  const uint32_t step = gridDim.x * kThreads;
  const int kinds = to.keys_only ? 1 : 2;
  for (int plane = blockIdx.y; plane < launch.planes; plane += gridDim.y) {
    const int batch = plane % to.batch;
    const int head_and_kind = plane / to.batch;
    const Source& source = head_and_kind % kinds == 0 ? launch.k : launch.v;
    const uint4* const from =
        source.data + batch * source.batch_stride + head_and_kind / kinds * source.head_stride;
    uint4* const into =
        static_cast<uint4*>(to.staged) + int64_t{plane} * to.staged_rows * row_pieces;
    for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < pieces;
         first += kInFlight * step) {
      uint4 read[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const uint32_t i = first + j * step;
        const uint32_t row = i / row_pieces;
        if (i < pieces) read[j] = from[row * source.row_stride + (i - row * row_pieces)];
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const uint32_t i = first + j * step;
        if (i < pieces && failed == 0) into[i] = read[j];
      }
    }
  }

  // Who has seen the failure is not counted, and so nobody told. The last block to finish speaks
  // for all: what they wrote is visible before the signals.
  if (__syncthreads_or(failed != 0)) return;
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    is_last = add_acquire_release(to.blocks_done, 1) == gridDim.x * gridDim.y - 1;
  }
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x < to.num_signals) {
    store_relaxed_system(to.taken_back[threadIdx.x], 0);
    store_release_system(to.signals[threadIdx.x], 1);
  }
  if (threadIdx.x == kThreads - 1) {  // not of a warp that has others to wait for
    *to.blocks_done = 0;
    store_relaxed_system(to.phase_shown, to.phase);
    store_relaxed_system(to.calls_shown, ++*to.calls);
  }
  if (threadIdx.x < to.num_awaited) wait_for_word(to.awaited[threadIdx.x], to.failed);
}

// Whether the code that the device has been given waits for the kernel before it. What was compiled
// for an older one runs on a newer one too, but does not.
bool can_be_early() {
  static const bool can = [] {
    cudaFuncAttributes attributes = {};
    return cudaFuncGetAttributes(&attributes, stage_kernel) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  }();
  return can;
}

Source in_pieces(const StageSource& x) {
  return {static_cast<const uint4*>(x.data), x.batch_stride / kStagePiece,
          x.row_stride / kStagePiece, x.head_stride / kStagePiece};
}

}  // namespace

cudaError_t stage(const StageParams& params, cudaStream_t stream) {
  Launch launch;
  launch.to = params;
  launch.to.batch = std::max(params.batch, 1);
  launch.k = in_pieces(params.k);
  launch.v = in_pieces(params.v);
  const int64_t row_pieces = (params.row_bytes + kStagePiece - 1) / kStagePiece;
  const int64_t planes =
      int64_t{params.keys_only ? 1 : 2} * params.num_kv_heads * params.batch * (params.rows > 0);
  const int64_t pieces = params.rows * row_pieces;  // of one plane
  if (planes > INT32_MAX || pieces > kMostPieces) return cudaErrorInvalidConfiguration;
  launch.pieces_per_row = static_cast<uint32_t>(row_pieces);
  launch.planes = static_cast<int>(planes);
  const int64_t wanted = (pieces + kInFlight * kThreads - 1) / (kInFlight * kThreads);
  const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMostBlocks)),
                  static_cast<unsigned>(std::clamp<int64_t>(planes, 1, kMostPlanes)));
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = params.early && can_be_early() ? 1 : 0;
  return cudaLaunchKernelEx(&config, stage_kernel, launch);
}

}  // namespace ringattn::cuda
