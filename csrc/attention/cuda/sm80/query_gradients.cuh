// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/query_bounds.h"
#include "attention/cuda/sm80/mma.cuh"
#include "attention/cuda/sm80/tile_products.cuh"
#include "attention/params.h"

// The share of a tile of keys in dq, added to global memory: in any order, or one tile of keys
// after the other.

namespace ringattn::cuda::sm80 {

__device__ __forceinline__ float2 scaled(const float2& x, float scale) {
  return make_float2(x.x * scale, x.y * scale);
}
__device__ __forceinline__ float4 scaled(const float4& x, float scale) {
  return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
}

/// *to += x, where item < num_items. Note: compared here, so that no branch surrounds
/// each addition.
__device__ __forceinline__ void add_to_global(float* to, const float2& x, int item, int num_items) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.lt.s32 valid, %3, %4;\n"
#if __CUDA_ARCH__ >= 900
      "@valid red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};\n"
#else
      "@valid red.relaxed.gpu.global.add.f32 [%0], %1;\n"
      "@valid red.relaxed.gpu.global.add.f32 [%0 + 4], %2;\n"
#endif
      "}" ::"l"(to),
      "f"(x.x), "f"(x.y), "r"(item), "r"(num_items)
      : "memory");
}
__device__ __forceinline__ void add_to_global(float* to, const float4& x, int item, int num_items) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.lt.s32 valid, %5, %6;\n"
      "@valid red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(item), "r"(num_items)
      : "memory");
#else
  add_to_global(to, make_float2(x.x, x.y), item, num_items);
  add_to_global(to + 2, make_float2(x.z, x.w), item, num_items);
#endif
}

/// What a thread block computes, in shared memory: values that all threads read and seldom need
/// would take registers from the sums.
struct KeyTileWork {
  int batch;
  int kv_head;
  int key_tile;
  QueryRange some;  // no row outside it sees one of the keys; 0, 0: none does
  QueryRange all;   // every row of it sees every key
  /// Turns at the rows of dq, in deterministic calls: a semaphore for each kTurnRows of them holds
  /// the number of the last key tile that has added to them, plus 1. A key tile's turn comes after
  /// the last one before it that visits the same rows. Bounds do not decrease: of the tiles
  /// between, no row sees a key.
  int awaited;      // what the semaphores of rows before awaited_end must hold
  int awaited_end;  // later rows are awaited of no key tile
  bool gave_up;
};

constexpr int kTurnRows = 64;

/// Sets the turn of a key tile. All threads of the block call it.
__device__ inline void find_turn(KeyTileWork& work, const QueryBounds& bounds, int block_k) {
  // The last key before the tile that some row sees.
  int found = -1;
  for (int end = work.key_tile * block_k; end > 0 && found < 0; end -= blockDim.x) {
    const int key = end - 1 - static_cast<int>(threadIdx.x);
    const bool seen = key >= 0 && !bounds.range(key).empty();
    if (threadIdx.x == 0) work.awaited = -1;
    __syncthreads();
    if (seen) atomicMax(&work.awaited, key);
    __syncthreads();
    found = work.awaited;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  work.awaited = found < 0 ? 0 : found / block_k + 1;
  work.awaited_end = found < 0 ? 0 : bounds.range(found).end;
  work.gave_up = false;
}

/// Before rows from first_row on are added to, a tile that does not cross a multiple of kTurnRows.
__device__ __forceinline__ void wait_for_turn(KeyTileWork& work, const int32_t* semaphores,
                                              int first_row) {
  const bool first = first_row % kTurnRows == 0 || first_row <= work.some.begin;
  if (!first || first_row / kTurnRows * kTurnRows >= work.awaited_end) return;
  if (threadIdx.x == 0 && !work.gave_up) {
    // Note: bounded. A table that decreases, whose result is unspecified, may give no turn.
    constexpr int64_t kCycles = int64_t{1} << 31;
    const int64_t start = clock64();
    int32_t value;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                   : "=r"(value)
                   : "l"(semaphores + first_row / kTurnRows)
                   : "memory");
      work.gave_up = clock64() - start > kCycles;
    } while (value != work.awaited && !work.gave_up);
  }
  __syncthreads();
}

/// After it.
__device__ __forceinline__ void end_turn(const KeyTileWork& work, int32_t* semaphores,
                                         int first_row, int block_q) {
  const int end = first_row + block_q;
  if (end % kTurnRows != 0 && end < work.some.end) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphores + first_row / kTurnRows),
                 "r"(work.key_tile + 1)
                 : "memory");
  }
}

/// dq += scale * score_gradients @ k, for the rows of the tile that see a key.
template <typename Tile>
__device__ __forceinline__ void add_query_gradients(const BlockAttentionBackwardParams& p,
                                                    KeyTileWork& work, int head, int tile,
                                                    uint32_t score_gradients, uint32_t k) {
  using Product = typename Tile::QueryGradients;
  const int warp = thread_index_again() / kWarpSize;
  const int warp_row = warp / Tile::kQueryWarpsD * Tile::kQueryM * 16;
  const int first_column = warp % Tile::kQueryWarpsD * Tile::kQueryN * Tile::kQueryPasses * 8;
  const int first_row = tile * Tile::kBlockQ;
  int32_t* const semaphores =
      p.semaphores + (int64_t{work.batch} * p.num_heads + head) *
                         ((p.num_queries + kTurnRows - 1) / kTurnRows);
#pragma unroll
  for (int pass = 0; pass < Tile::kQueryPasses; ++pass) {
    const int warp_column = first_column + pass * Tile::kQueryN * 8;
    typename Product::Sums dq = {};
    Product::add(dq, score_gradients, warp_row, k, warp_column);
    if (pass == 0 && p.deterministic) wait_for_turn(work, semaphores, first_row);
    float* const to = static_cast<float*>(p.dq.data) + work.batch * p.dq.batch_stride +
                      head * p.dq.head_stride + warp_column;
    Product::for_each(dq, [&](int row, int column, auto values) {
      const int query = first_row + warp_row + row;
      const bool seen = query >= work.some.begin && query < work.some.end;
      add_to_global(to + query * p.dq.row_stride + column, scaled(values, p.scale),
                    column, seen ? p.head_dim - warp_column : 0);
    });
  }
  if (p.deterministic) end_turn(work, semaphores, first_row, Tile::kBlockQ);
}

}  // namespace ringattn::cuda::sm80
