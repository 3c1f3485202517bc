// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/ptx/warp_product.cuh"
#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/sm90/tile.cuh"

namespace ringattn::cuda::sm90 {

/// Recomputes s = q @ k.T in the given rows of a warp's 16, without the other warps of its
/// warpgroup. Rare, so small rather than fast.
///   queries, keys  tiles in shared memory with the 128-byte swizzle, in blocks of 64 columns that
///                  `..._block_bytes` apart; queries begin with the warpgroup's first row
template <typename Element, int kHeadDim, int kScores>
__device__ __forceinline__ void recompute_scores(float (&s)[kScores], const RowFlags& rows,
                                                 uint32_t queries, uint32_t query_block_bytes,
                                                 uint32_t keys, uint32_t key_block_bytes) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupSize / 32 * 16 + lane % 16;
  // The swizzle: a row's vectors of 16 bytes, 8 columns, are permuted by the row's number.
  const auto address = [](uint32_t block, int row, int vector) {
    return block + row * kColumnBlockPitch + (vector ^ row % 8) * 16;
  };
#pragma unroll
  for (int n = 0; n < kScores / 4; ++n) {
    const int key = 8 * n + lane % 8;
    float product[4] = {};
#pragma unroll 1
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int block = step / 4, vector = step % 4 * 2;
      uint32_t q[4], k[2];
      load_matrices(q, address(queries + block * query_block_bytes, row, vector + lane / 16));
      load_matrices(k, address(keys + block * key_block_bytes, key, vector + lane / 8 % 2));
      add_warp_product<Element>(product, q, k);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (rows[i / 2]) s[4 * n + i] = product[i];
    }
  }
}

}  // namespace ringattn::cuda::sm90
