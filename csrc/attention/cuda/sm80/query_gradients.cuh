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
__device__ __forceinline__ void add_to_global(float* to, const float4& x, int item, int num_items) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.lt.s32 valid, %5, %6;\n"
#if __CUDA_ARCH__ >= 900
      "@valid red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
#else
      "@valid red.relaxed.gpu.global.add.f32 [%0], %1;\n"
      "@valid red.relaxed.gpu.global.add.f32 [%0 + 4], %2;\n"
      "@valid red.relaxed.gpu.global.add.f32 [%0 + 8], %3;\n"
      "@valid red.relaxed.gpu.global.add.f32 [%0 + 12], %4;\n"
#endif
      "}" ::"l"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(item), "r"(num_items)
      : "memory");
}

/// What a thread block computes, in shared memory: values that all threads read and seldom need
/// would take registers from the sums.
struct KeyTileWork {
  int batch;
  int kv_head;
  int part;                   // of the KV head's group
  int first_head, num_heads;  // of the part
  int key_tile;
  QueryRange some;  // no row outside it sees one of the keys; 0, 0: none does
  QueryRange all;   // every row of it sees every key
  struct Step {     // a tile of queries
    int head, first_row;
  } steps[2];  // this and the next, even ones and odd ones
  /// Turns at the rows of dq, in deterministic calls: a semaphore for each kTurnRows of them holds
  /// the number of the last key tile that has added to them, plus 1. A key tile's turn comes after
  /// the last one before it that visits the same rows. Bounds do not decrease: of the tiles
  /// between, no row sees a key.
  int awaited;      // what the semaphores of rows before awaited_end must hold
  int awaited_end;  // later rows are awaited of no key tile
  bool gave_up;
};

constexpr int kTurnRows = 64;  // a larger tile takes the turn of its first rows

__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

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

/// Before the rows of the tile from first_row on are added to. Tiles come last first.
template <typename Tile>
__device__ __forceinline__ void wait_for_turn(KeyTileWork& work, const int32_t* semaphores,
                                              int first_row) {
  const int end = first_row + Tile::kBlockQ;
  const bool first = end % kTurnRows == 0 || end >= work.some.end;
  if (!first || first_row / kTurnRows * kTurnRows >= work.awaited_end) return;
  if (threadIdx.x == 0 && !work.gave_up) {
    // Note: bounded. A table that decreases, whose result is unspecified, may give no turn.
    constexpr int64_t kCycles = int64_t{1} << 31;
    const int64_t start = clock64();
    while (load_acquire(semaphores + first_row / kTurnRows) != work.awaited) {
      if (clock64() - start < kCycles) continue;
      work.gave_up = true;
      break;
    }
  }
  __syncthreads();
}

/// The semaphores of a head's rows.
__device__ __forceinline__ int32_t* semaphores_of(const BlockAttentionBackwardParams& p, int batch,
                                                  int head) {
  return p.semaphores +
         (int64_t{batch} * p.num_heads + head) * ((p.num_queries + kTurnRows - 1) / kTurnRows);
}

/// After them, and a barrier: a step later, when few additions are still on their way.
template <typename Tile>
__device__ __forceinline__ void end_turn(const BlockAttentionBackwardParams& p,
                                         const KeyTileWork& work, int step) {
  if (threadIdx.x != 0) return;
  const auto [head, first_row] = work.steps[step % 2];
  if (first_row % kTurnRows != 0 && first_row > work.some.begin) return;
  int32_t* const semaphore = semaphores_of(p, work.batch, head) + first_row / kTurnRows;
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphore), "r"(work.key_tile + 1)
               : "memory");
}

/// dq += scale * score_gradients @ k, for the rows of the tile that see a key.
template <typename Tile>
__device__ __forceinline__ void add_query_gradients(const BlockAttentionBackwardParams& p,
                                                    KeyTileWork& work, int step,
                                                    uint32_t score_gradients, uint32_t k) {
  using Product = typename Tile::QueryGradients;
  const int warp_row = Tile::query_row(), warp_column = Tile::query_column();
  const auto [head, first_row] = work.steps[step % 2];
  typename Product::Sums dq = {};
  Product::add(dq, score_gradients, warp_row, k, warp_column);
  if (p.deterministic) wait_for_turn<Tile>(work, semaphores_of(p, work.batch, head), first_row);
  float* const to = static_cast<float*>(p.dq.data) + work.batch * p.dq.batch_stride +
                    head * p.dq.head_stride + warp_column;
  Product::for_each_four(dq, [&](int row, int column, const float4& values) {
    const int query = first_row + warp_row + row;
    const bool seen = query >= work.some.begin && query < work.some.end;
    add_to_global(to + query * p.dq.row_stride + column, scaled(values, p.scale), column,
                  seen ? p.head_dim - warp_column : 0);
  });
}

}  // namespace ringattn::cuda::sm80
