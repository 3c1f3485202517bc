// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/softmax.cuh"
#include "attention/params.h"

// From a warp's accumulators to `out` and `state`. Eight rows at a time pass through shared memory,
// so that whole rows of state are read and whole rows of results written, 16 bytes a lane.

namespace ringattn::cuda::sm80 {

/// The eight rows of a step, in shared memory of the warp, [8, kHeadDim]
/// float32. Chunks are permuted so that accumulators of either layout of products.cuh come in
/// without bank conflicts.
template <int kHeadDim>
struct StagedRows {
  unsigned char* base;

  __device__ __forceinline__ float* chunk(int row, int chunk) const {
    const int permuted = chunk ^ (row % 4 * 2 + row % 2);
    return reinterpret_cast<float*>(base + (row * (kHeadDim / 4) + permuted) * kChunkBytes);
  }
};

/// The state is needed at the very end; fetch the lines of this block's rows into L2 while the last
/// keys are attended.
template <int kRows, int kThreads>
__device__ __forceinline__ void prefetch_state(const BlockAttentionParams& p, int batch, int head,
                                               int first_row) {
  const float* state = static_cast<const float*>(p.state.data) + batch * p.state.batch_stride +
                       head * p.state.head_stride;
  constexpr int kFloatsPerLine = kLineBytes / sizeof(float);
  const int end_row = min(first_row + kRows, p.num_queries);
  for (int row = first_row + static_cast<int>(threadIdx.x); row < end_row; row += kThreads) {
    for (int column = 0; column < p.head_dim; column += kFloatsPerLine) {
      prefetch_to_l2(state + row * p.state.row_stride + column);
    }
  }
}

template <typename Element>
__device__ __forceinline__ void store_rounded(void* data, int64_t offset, const float4& x) {
  if constexpr (std::is_same_v<Element, float>) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + offset) = x;
  } else {
    *reinterpret_cast<uint2*>(static_cast<Element*>(data) + offset) =
        make_uint2(pack<Element>(x.x, x.y), pack<Element>(x.z, x.w));
  }
}

/// Finishes the warp's rows first_row .. first_row + 16 * kM - 1: normalises, merges with the
/// state, gives final rows their sink, stores.
template <typename Element, int kM, int kHeadDim, typename Products>
__device__ __forceinline__ void store_results(const BlockAttentionParams& p, const float* sinks,
                                              int batch, int head, int first_row,
                                              const typename Products::Out& out,
                                              const OnlineSoftmax<kM>& softmax, float scale_log2,
                                              unsigned char* shared) {
  constexpr int kChunksPerRow = kHeadDim / 4;
  constexpr int kChunksPerLane = 8 * kChunksPerRow / kWarpSize;
  constexpr int kBatch = kChunksPerLane % 8 == 0   ? 8
                         : kChunksPerLane % 6 == 0 ? 6
                                                   : 4;  // loads in flight
  static_assert(kChunksPerLane % kBatch == 0);

  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const StagedRows<kHeadDim> staged{shared};
  float* lse = p.lse + batch * p.lse_batch_stride + head * p.lse_head_stride;
  float* state =
      static_cast<float*>(p.state.data) + batch * p.state.batch_stride + head * p.state.head_stride;
  const int64_t out_head = batch * p.out.batch_stride + head * p.out.head_stride;

#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = first_row + 16 * m + 8 * half;
      const int own_row = first + g;
      const float sum = softmax.row_sum(m, half);
      float row_lse = softmax.lse(m, half, sum, scale_log2);
      // A row that saw nothing is 0 whatever the values (a NaN among them) that its tile was
      // multiplied with.
      const bool empty = row_lse == -INFINITY;
      float norm = reciprocal(sum);
      float keep = 0.0f;       // of the state
      unsigned has_state = 0;  // a bit for each lane: its row is in the state, and not empty there
      if (p.fold) {
        const float before_lse = own_row < p.num_queries ? lse[own_row] : -INFINITY;
        has_state = __ballot_sync(0xffffffff, before_lse != -INFINITY);
        const MergeWeights weights(before_lse, row_lse);
        keep = weights.first;
        norm *= weights.second;
        row_lse = weights.lse;
      }
      if (sinks != nullptr && own_row >= p.final_begin && own_row < p.final_end) {
        const MergeWeights weights(row_lse, sinks[head]);
        keep *= weights.first;
        norm *= weights.first;
        row_lse = weights.lse;
      }
      __syncwarp();  // the quad has read lse, and the warp its last rows
      if (t == 0 && own_row < p.num_queries) lse[own_row] = row_lse;
#pragma unroll
      for (int n = 0; n < Products::kOutTiles; n += Products::kStoredTiles) {
        // kStoredTiles tiles make contiguous floats of a lane: two, or two whole chunks.
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = Products::out_column(n, c, t);
          float* to = staged.chunk(g, column / 4) + column % 4;
          if constexpr (Products::kStoredTiles == 4) {
            float4 x;
            x.x = empty ? 0.0f : out[m][n][2 * half + c] * norm;
            x.y = empty ? 0.0f : out[m][n + 1][2 * half + c] * norm;
            x.z = empty ? 0.0f : out[m][n + 2][2 * half + c] * norm;
            x.w = empty ? 0.0f : out[m][n + 3][2 * half + c] * norm;
            *reinterpret_cast<float4*>(to) = x;
          } else if (c == 0) {
            float2 x;
            x.x = empty ? 0.0f : out[m][n][2 * half] * norm;
            x.y = empty ? 0.0f : out[m][n][2 * half + 1] * norm;
            *reinterpret_cast<float2*>(to) = x;
          }
        }
      }
      __syncwarp();

#pragma unroll
      for (int begin = 0; begin < kChunksPerLane; begin += kBatch) {
        float4 before[kBatch];
        if (p.fold) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int item = (begin + i) * kWarpSize + lane;
            const int row = first + item / kChunksPerRow, column = item % kChunksPerRow * 4;
            before[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            // An empty row is not read: a NaN there would outlive the factor 0.
            if ((has_state >> item / kChunksPerRow * 4 & 1) != 0 && column < p.head_dim) {
              before[i] =
                  *reinterpret_cast<const float4*>(state + row * p.state.row_stride + column);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int item = (begin + i) * kWarpSize + lane;
          const int row = first + item / kChunksPerRow, chunk = item % kChunksPerRow;
          float4 x = *reinterpret_cast<const float4*>(staged.chunk(item / kChunksPerRow, chunk));
          if (p.fold) {
            const float row_keep = __shfl_sync(0xffffffff, keep, item / kChunksPerRow * 4);
            x.x = fmaf(before[i].x, row_keep, x.x);
            x.y = fmaf(before[i].y, row_keep, x.y);
            x.z = fmaf(before[i].z, row_keep, x.z);
            x.w = fmaf(before[i].w, row_keep, x.w);
          }
          if (row >= p.num_queries || 4 * chunk >= p.head_dim) continue;
          if (row >= p.final_begin && row < p.final_end) {
            store_rounded<Element>(p.out.data, out_head + row * p.out.row_stride + 4 * chunk, x);
          } else {
            *reinterpret_cast<float4*>(state + row * p.state.row_stride + 4 * chunk) = x;
          }
        }
      }
    }
}

}  // namespace ringattn::cuda::sm80
