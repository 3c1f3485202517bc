// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/stmatrix.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/sm90/tile.cuh"

// From a warpgroup's accumulators to memory. Where all rows of a tile are final and nothing is
// folded they leave through the copy engine; otherwise each lane merges and stores what it holds.

namespace ringattn::cuda::sm90 {

/// What a lane's two rows need to be finished.
struct RowResults {
  int row[2];
  int rows_end;
  float keep[2];  // of the state
  float norm[2];  // of the accumulators
  bool empty[2];  // a row that saw nothing is 0 whatever the values that its tile was multiplied
                  // with

  /// Also writes lse.
  __device__ __forceinline__ RowResults(const KernelParams& p, const QueryTile& tile, int first_row,
                                        const OnlineSoftmax& softmax, bool failed)
      : rows_end(tile.rows_end) {
    float* lse = p.lse + tile.batch * p.lse_batch_stride + tile.head * p.lse_head_stride;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = first_row + lane / 4 + 8 * half;
      const float sum = softmax.row_sum(half);
      float row_lse = softmax.lse(half, sum, p.scale_log2);
      norm[half] = reciprocal(sum);
      if (failed) row_lse = norm[half] = NAN;
      empty[half] = row_lse == -INFINITY;
      keep[half] = 0.0f;
      if (p.fold) {
        const MergeWeights weights(row[half] < rows_end ? lse[row[half]] : -INFINITY, row_lse);
        keep[half] = weights.first;
        norm[half] *= weights.second;
        row_lse = weights.lse;
      }
      __syncwarp();  // the quad has read lse
      if (lane % 4 == 0 && row[half] < rows_end) lse[row[half]] = row_lse;
    }
  }

  __device__ __forceinline__ float finished(int half, float x) const {
    return empty[half] ? 0.0f : x * norm[half];
  }
};

/// Whether the tile's results can leave through the copy engine: all of them are final, and rows
/// that its boxes have more than the tile are past the tensor's end.
template <typename Tile>
__device__ __forceinline__ bool boxes_are_final(const KernelParams& p, const QueryTile& tile) {
  return !p.fold && tile.first_row >= p.final_begin && tile.rows_end <= p.final_end &&
         (tile.rows_end == tile.first_row + Tile::kBlockQ || tile.rows_end == p.num_queries);
}

/// Rounds the warpgroup's 64 rows and has the copy engine store them; returns before it has.
///   shared: of the warpgroup, [kHeadDim / 64][64][64], blocks kQueryBlockBytes apart
///   barrier: a named one for the 128 threads
template <typename Element, typename Tile>
__device__ __forceinline__ void store_through_shared(const KernelParams& p, const QueryTile& tile,
                                                     int first_row, const RowResults& rows,
                                                     const float (&out)[Tile::kHeadDim / 2],
                                                     uint32_t shared, int barrier) {
  const int thread = threadIdx.x % kWarpgroupSize, lane = threadIdx.x % 32;
  if (thread == 0) wait_for_stores_to_read();  // of the tile before
  named_barrier_wait(barrier, kWarpgroupSize);

  // Matrices of one store: rows 0-7 and 8-15 of 8 columns, then of the next 8. The swizzle: chunks
  // of 16 bytes change places within a row, by the row.
  const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < Tile::kHeadDim / 8; n += 2) {
    const int chunk = n % 8 + lane / 16;
    const uint32_t to = shared + n / 8 * Tile::kQueryBlockBytes + row * kColumnBlockPitch +
                        (chunk ^ (row % 8)) * 16;
    const auto packed = [&](int tile_of_8, int half) {
      const int i = 4 * tile_of_8 + 2 * half;
      return pack<Element>(rows.finished(half, out[i]), rows.finished(half, out[i + 1]));
    };
    store_matrices(to, packed(n, 0), packed(n, 1), packed(n + 1, 0), packed(n + 1, 1));
  }
  fence_async_shared();
  named_barrier_wait(barrier, kWarpgroupSize);
  if (thread == 0) {
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      store_box(p.out, {block * kColumnBlock, first_row, tile.head, tile.batch},
                shared + block * Tile::kQueryBlockBytes);
    }
    commit_stores();
  }
}

/// Merges with the state where there is one; each row goes to `out` or to `state`.
template <typename Element, typename Tile>
__device__ __forceinline__ void store_directly(const KernelParams& p, const QueryTile& tile,
                                               const RowResults& rows,
                                               const float (&out)[Tile::kHeadDim / 2]) {
  constexpr int kTiles = Tile::kHeadDim / 8;         // of 8 columns
  constexpr int kBatch = kTiles < 16 ? kTiles : 16;  // loads in flight, twice
  const int first_column = threadIdx.x % 4 * 2;
  float* state = static_cast<float*>(p.state_memory.data) +
                 tile.batch * p.state_memory.batch_stride + tile.head * p.state_memory.head_stride;
  Element* rounded = static_cast<Element*>(p.out_memory.data) +
                     tile.batch * p.out_memory.batch_stride + tile.head * p.out_memory.head_stride;

#pragma unroll
  for (int begin = 0; begin < kTiles; begin += kBatch) {
    float2 before[2][kBatch];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int column = 8 * (begin + i) + first_column;
        before[half][i] = make_float2(0.0f, 0.0f);
        if (p.fold && rows.row[half] < rows.rows_end && column < p.head_dim) {
          before[half][i] = *reinterpret_cast<const float2*>(
              state + rows.row[half] * p.state_memory.row_stride + column);
        }
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.row[half];
      const bool is_final = row >= p.final_begin && row < p.final_end;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int column = 8 * (begin + i) + first_column;
        const int accumulator = 4 * (begin + i) + 2 * half;
        const float x =
            fmaf(before[half][i].x, rows.keep[half], rows.finished(half, out[accumulator]));
        const float y =
            fmaf(before[half][i].y, rows.keep[half], rows.finished(half, out[accumulator + 1]));
        if (row >= rows.rows_end || column >= p.head_dim) continue;
        if (is_final) {
          *reinterpret_cast<uint32_t*>(rounded + row * p.out_memory.row_stride + column) =
              pack<Element>(x, y);
        } else {
          *reinterpret_cast<float2*>(state + row * p.state_memory.row_stride + column) =
              make_float2(x, y);
        }
      }
    }
  }
}

}  // namespace ringattn::cuda::sm90
