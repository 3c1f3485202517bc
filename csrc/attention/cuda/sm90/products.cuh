// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/shared_words.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/score_product.cuh"
#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/sm90/tile.cuh"

// The two products of a consumer warpgroup: its 64 query rows with a tile of keys, and their
// probabilities with a tile of values.

namespace ringattn::cuda::sm90 {

/// q = -q in the warpgroup's 64 rows, for a negative scale: online softmax needs the largest score.
template <typename Tile>
__device__ __forceinline__ void negate_queries(uint32_t queries, int barrier) {
  constexpr int kVectors = kConsumerRows * kColumnBlockPitch / 16;  // of a column block
#pragma unroll 1
  for (int i = threadIdx.x % kWarpgroupSize; i < Tile::kColumnBlocks * kVectors;
       i += kWarpgroupSize) {
    const uint32_t at = queries + i / kVectors * Tile::kQueryBlockBytes + i % kVectors * 16;
    constexpr int kSigns = static_cast<int>(0x80008000);
    const int4 x = load_words(at);
    store_words(at, {x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns});
  }
  fence_async_shared();
  named_barrier_wait(barrier, kWarpgroupSize);
}

/// Issues a group of products: s = q @ k.T, of 64 query rows with a tile of keys.
template <typename Element, typename Tile, int kScores>
__device__ __forceinline__ void issue_scores(float (&s)[kScores], uint32_t queries, uint32_t keys) {
  issue_score_product<Element, Tile::kHeadDim, Tile::kQueryBlockBytes, Tile::kKeyBlockBytes>(
      s, queries, keys);
}

/// Issues a group of products: out += p @ v, of keys [16 * kBegin, 16 * kEnd) of the tile.
template <typename Element, typename Tile, int kBegin = 0, int kEnd = Tile::kBlockK / 16>
__device__ __forceinline__ void issue_values(float (&out)[Tile::kHeadDim / 2],
                                             const uint32_t (&p)[Tile::kBlockK / 4],
                                             uint32_t values) {
  const auto v = OperandDescriptor::n_major(values, Tile::kKeyBlockBytes);
  begin_products();
#pragma unroll
  for (int step = kBegin; step < kEnd; ++step) {
    ProductOfRegisters<Element, Tile::kHeadDim>::issue(out, p[4 * step], p[4 * step + 1],
                                                       p[4 * step + 2], p[4 * step + 3],
                                                       v.at(step * 16 * kColumnBlockPitch));
  }
  commit_products();
}

/// out += p @ v in some of a lane's two rows. In the others `out` stays, also where p is 0 and v is
/// not finite: sums of the products are registers of their own. Returns when it is done.
///   values  of a tile, in blocks of 64 columns that are `value_block_bytes` apart
///   rows    which of the two: called under the products
template <typename Element, int kAccumulators, int kOperands, typename Rows>
__device__ __forceinline__ void add_values_to_rows(float (&out)[kAccumulators],
                                                   const uint32_t (&p)[kOperands], uint32_t values,
                                                   uint32_t value_block_bytes, const Rows& rows) {
  // A block of columns at a time: above D 64, registers do not hold all of them twice.
  constexpr int kSums = kColumnBlock / 2;
  using Product = ProductOfRegisters<Element, kColumnBlock>;
#pragma unroll
  for (int block = 0; block < kAccumulators / kSums; ++block) {
    const auto v =
        OperandDescriptor::n_major(values + block * value_block_bytes, value_block_bytes);
    float sums[kSums];
    begin_products();
    Product::template issue<false>(sums, p[0], p[1], p[2], p[3], v.at(0));
#pragma unroll
    for (int step = 1; step < kOperands / 4; ++step) {
      Product::issue(sums, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                     v.at(step * 16 * kColumnBlockPitch));
    }
    commit_products();
    const RowFlags added = rows();
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (added[i / 2 % 2]) out[block * kSums + i] += sums[i];
    }
  }
}

}  // namespace ringattn::cuda::sm90
