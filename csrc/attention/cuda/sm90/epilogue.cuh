// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/stmatrix.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/sm90/tile.cuh"

// From a warpgroup's accumulators to memory. Where possible through the copy engine, which loads
// the state early and stores results late, so that no warp waits for memory; otherwise each lane
// loads, merges and stores what it holds.

namespace ringattn::cuda::sm90 {

__device__ __forceinline__ float* lse_of_head(const KernelParams& p, const QueryTile& tile) {
  return p.lse + tile.batch * p.lse_batch_stride + tile.head * p.lse_head_stride;
}

/// Prefetches the lse of a lane's row into L2 while the tile is attended.
__device__ __forceinline__ void prefetch_lse(const KernelParams& p, const QueryTile& tile,
                                             int row) {
  if (row < tile.rows_end) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(lse_of_head(p, tile) + row));
  }
}

/// Factors and lse of a lane's two rows.
struct RowResults {
  int row[2];
  int rows_end;
  float keep[2];  // factor of the state
  float norm[2];  // factor of the accumulators
  bool empty[2];  // no key was visible
  bool folds[2];  // into a state that is not empty: a NaN of one that is would outlive keep, 0

  /// Computes them and writes lse. Each step handles both rows, so that their latencies overlap.
  ///   first_row  the lane's first row
  ///   sink       of the head; of general variants
  template <int kSegments, Variant kVariant>
  __device__ __forceinline__ void finish(const SegmentedParams<kSegments, kVariant>& p,
                                         const QueryTile& tile, int first_row,
                                         const OnlineSoftmax& softmax, bool failed,
                                         float sink = 0.0f) {
    float* lse = lse_of_head(p, tile);
    float before[2] = {-INFINITY, -INFINITY}, row_lse[2];
    rows_end = tile.rows_end;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = first_row + 8 * half;
      if (p.fold && row[half] < rows_end) before[half] = lse[row[half]];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum(half);
      row_lse[half] = softmax.lse(half, sum, p.softmax_scale());
      empty[half] = !failed && row_lse[half] == -INFINITY;
      norm[half] = empty[half] ? 0.0f : reciprocal(sum);
      if (failed) row_lse[half] = norm[half] = NAN;
      keep[half] = 0.0f;
      folds[half] = before[half] != -INFINITY;
    }
    if (p.fold) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const MergeWeights weights(before[half], row_lse[half]);
        keep[half] = weights.first;
        norm[half] *= weights.second;
        row_lse[half] = weights.lse;
      }
      __syncwarp();  // the quad has read lse
    }
    if constexpr (p.kGeneral) {
      if (p.sinks != nullptr) join_sink(p, sink, row_lse);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (threadIdx.x % 4 == 0 && row[half] < rows_end) lse[row[half]] = row_lse[half];
    }
  }

  /// A row that saw nothing is not stored if its state is not empty: its result is there already.
  __device__ __forceinline__ void leave_states() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (empty[half] && folds[half]) row[half] = rows_end;
    }
  }

  /// A final row's softmax gets the logit of its head's sink, which has no value.
  __device__ __forceinline__ void join_sink(const KernelParams& p, float sink,
                                            float (&row_lse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row[half] < p.final_begin || row[half] >= p.final_end) continue;
      const MergeWeights weights(row_lse[half], sink);
      keep[half] *= weights.first;
      norm[half] *= weights.first;
      row_lse[half] = weights.lse;
    }
  }

  /// A row that saw nothing is 0, whatever the values that its tile was multiplied with.
  template <int kAccumulators>
  __device__ __forceinline__ void clear_empty(float (&out)[kAccumulators]) const {
    if (!__any_sync(0xffffffff, empty[0] || empty[1])) return;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      if (empty[i / 2 % 2]) out[i] = 0.0f;
    }
  }
};

__device__ __forceinline__ bool all_final(const KernelParams& p, const QueryTile& tile) {
  return tile.first_row >= p.final_begin && tile.rows_end <= p.final_end;
}

__device__ __forceinline__ bool none_final(const KernelParams& p, const QueryTile& tile) {
  return tile.rows_end <= p.final_begin || tile.first_row >= p.final_end;
}

/// Whether the copy engine loads the tile's state and stores its results: the tile has rows, all of
/// them go to the same tensor, and rows of its boxes beyond the tile are past the tensor's end.
template <typename Tile>
__device__ __forceinline__ bool goes_through_shared(const KernelParams& p, const QueryTile& tile) {
  const bool is_state = none_final(p, tile);
  const bool has_room = Tile::kStateThroughShared || !p.fold;
  return has_room && (all_final(p, tile) || (Tile::kStateThroughShared && is_state)) &&
         (tile.rows_end == tile.first_row + Tile::kBlockQ ||
          (tile.rows_end == p.num_queries && tile.first_row < p.num_queries));
}

/// Merges the warpgroup's 64 rows with the state, which the copy engine has fetched, rounds them
/// where they are final, and has the engine store them; returns before it has. The memory that
/// results leave through must be free: the engine has read those of the tile before, and at D 256
/// the tensor cores the queries, and all threads know.
template <typename Element, typename Tile>
__device__ __forceinline__ void store_through_shared(const KernelParams& p, const QueryTile& tile,
                                                     const SharedMemory<Tile>& shared, int consumer,
                                                     const RowResults& rows,
                                                     float (&out)[Tile::kHeadDim / 2]) {
  const int thread = threadIdx.x % kWarpgroupSize, lane = threadIdx.x % 32;
  const int first_row = tile.first_row + consumer * kConsumerRows;
  const uint32_t results = shared.results(consumer);
  const int barrier = kWarpgroupBarrier + consumer;

  // The swizzle: vectors of 16 bytes are permuted within a row, by the row's number.
  const uint32_t state_row = results + (thread / 32 * 16 + lane / 4) * kColumnBlockPitch;
  const auto state_at = [&](int half, int tile_of_8) {
    const int vector = tile_of_8 % 4 * 2 + lane % 4 / 2;
    return state_row + tile_of_8 / 4 * Tile::kResultBlockBytes + half * 8 * kColumnBlockPitch +
           (vector ^ (lane / 4)) * 16 + lane % 2 * 8;
  };

  if (Tile::kStateThroughShared && p.fold) {
    wait(shared.state_full(), tile.state_parity);
#pragma unroll
    for (int i = 0; i < Tile::kHeadDim / 4; ++i) {
      const int half = i % 2, at = 4 * (i / 2) + 2 * half;
      float2 before = make_float2(0.0f, 0.0f);
      if (rows.folds[half]) before = load_shared_pair(state_at(half, i / 2));
      out[at] = fmaf(before.x, rows.keep[half], out[at] * rows.norm[half]);
      out[at + 1] = fmaf(before.y, rows.keep[half], out[at + 1] * rows.norm[half]);
    }
    __syncwarp();  // all lanes have read the state before rounded results overwrite it
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kHeadDim / 2; ++i) out[i] *= rows.norm[i / 2 % 2];
  }

  const bool is_final = all_final(p, tile);
  if (is_final) {
    // Matrices of one store: rows 0-7 and 8-15 of 8 columns, then of the next 8.
    const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < Tile::kHeadDim / 8; n += 2) {
      const int vector = n % 8 + lane / 16;
      const uint32_t to = results + n / 8 * Tile::kOutBlockBytes + row * kColumnBlockPitch +
                          (vector ^ (row % 8)) * 16;
      const float* x = out + 4 * n;
      store_matrices(to, pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]),
                     pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kHeadDim / 4; ++i) {
      const int half = i % 2, at = 4 * (i / 2) + 2 * half;
      store_shared_pair(state_at(half, i / 2), make_float2(out[at], out[at + 1]));
    }
  }
  fence_async_shared();
  named_barrier_wait(barrier, kWarpgroupSize);
  if (thread != 0) return;
  if (is_final) {
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      store_box(p.out, {block * kColumnBlock, first_row, tile.head, tile.batch},
                results + block * Tile::kOutBlockBytes);
    }
  } else {
#pragma unroll
    for (int block = 0; block < Tile::kStateBlocks; ++block) {
      store_box(p.state, {block * kStateBlock, first_row, tile.head, tile.batch},
                results + block * Tile::kResultBlockBytes);
    }
  }
  commit_stores();
  if (Tile::kStateThroughShared && p.fold) {
    wait_for_stores_to_read();
    arrive(shared.state_free());
  }
}

/// Merges with the state where there is one; each row goes to `out` or to `state`. Addresses are
/// computed once for each row: for each pair of columns they would be most of the instructions.
///   kMaxBatch  loads in flight for each row
template <typename Element, typename Tile, int kMaxBatch = 16>
__device__ __forceinline__ void store_directly(const KernelParams& p, const QueryTile& tile,
                                               const RowResults& rows,
                                               const float (&out)[Tile::kHeadDim / 2]) {
  constexpr int kTiles = Tile::kHeadDim / 8;  // of 8 columns
  constexpr int kBatch = kTiles < kMaxBatch ? kTiles : kMaxBatch;
  const int first_column = threadIdx.x % 4 * 2;
  const auto row_of = [&](const auto& memory, int row) {
    return tile.batch * memory.batch_stride + tile.head * memory.head_stride +
           row * memory.row_stride + first_column;
  };
  float2* state[2];
  uint32_t* rounded[2];
  int num_tiles[2];  // tiles in which this lane has a pair of columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.row[half];
    state[half] = reinterpret_cast<float2*>(static_cast<float*>(p.state_memory.data) +
                                            row_of(p.state_memory, row));
    rounded[half] = reinterpret_cast<uint32_t*>(static_cast<Element*>(p.out_memory.data) +
                                                row_of(p.out_memory, row));
    num_tiles[half] = row < rows.rows_end ? (p.head_dim - first_column + 7) / 8 : 0;
  }

#pragma unroll
  for (int begin = 0; begin < kTiles; begin += kBatch) {
    float2 before[2][kBatch];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        before[half][i] = make_float2(0.0f, 0.0f);
        if (rows.folds[half] && begin + i < num_tiles[half])
          before[half][i] = state[half][4 * (begin + i)];
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.row[half];
      const bool is_final = row >= p.final_begin && row < p.final_end;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int accumulator = 4 * (begin + i) + 2 * half;
        const float x =
            fmaf(before[half][i].x, rows.keep[half], out[accumulator] * rows.norm[half]);
        const float y =
            fmaf(before[half][i].y, rows.keep[half], out[accumulator + 1] * rows.norm[half]);
        if (begin + i >= num_tiles[half]) continue;
        if (is_final) {
          rounded[half][4 * (begin + i)] = pack<Element>(x, y);
        } else {
          state[half][4 * (begin + i)] = make_float2(x, y);
        }
      }
    }
  }
}

}  // namespace ringattn::cuda::sm90
