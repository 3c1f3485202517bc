// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfloat>
#include <cmath>

#include "attention/cuda/sm80/mma.cuh"

// Online softmax over tiles of scores laid out as products.cuh says: a lane holds parts of 2 * kM
// rows, and the four lanes of a quad hold a row.

namespace ringattn::cuda::sm80 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// A row's accumulators are rescaled only when its maximum has grown by more than this many powers
/// of two; until then its probabilities exceed 1, by at most 2^8, which costs no accuracy in any
/// type.
constexpr float kRescaleThreshold = 8.0f;

/// |scale| * log2(e), away from 0 so that a masked score (-inf) times it is -inf. Queries carry the
/// sign.
__device__ __forceinline__ float scale_in_powers_of_two(float scale) {
  return fmaxf(fabsf(scale) * kLog2E, FLT_MIN);
}

/// s[i, j] = -inf where key j is past the last one row i sees. Scores are replaced, not added to: a
/// NaN behind the mask stays there.
///   last_key: of this lane's first row, relative to the tile's first key; later rows see more when
///   causal num_keys: of the tensor, relative to the tile's first key
template <int kM, int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kM][kTiles][4], int last_key, int num_keys) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = min(last_key + 16 * m + 8 * half, num_keys - 1) - 2 * t;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c > last) s[m][n][2 * half + c] = -INFINITY;
        }
    }
}

template <int kM>
struct OnlineSoftmax {
  float max[kM]
           [2];  // of the raw scores, the same in a quad; it may lag behind by kRescaleThreshold
  float sum[kM][2];  // of the probabilities of this lane alone, relative to max

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      max[m][0] = max[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  /// Scores become probabilities; decay is what earlier accumulators have to be multiplied by.
  /// Returns whether any row of this warp decays.
  template <int kTiles>
  __device__ __forceinline__ bool update(float (&s)[kM][kTiles][4], float scale_log2,
                                         float (&decay)[kM][2]) {
    bool moved = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_max = s[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          tile_max = fmaxf(tile_max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 2));
        const float before = max[m][half];
        // False where nothing was seen yet and nothing is seen now: -inf - -inf is NaN.
        const bool grown = (tile_max - before) * scale_log2 > kRescaleThreshold;
        const float now = grown ? tile_max : before;
        const float offset = scaled_max(now, scale_log2);
        decay[m][half] = grown ? exp2_approx(before * scale_log2 - offset) : 1.0f;
        max[m][half] = now;
        moved |= grown;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = s[m][n][2 * half + c];
            // fmaxf drops a NaN, this does not: it stays in the probability and in the sum.
            score = exp2_approx(fmaf(score, scale_log2, -offset));
            total += score;
          }
        sum[m][half] = fmaf(sum[m][half], decay[m][half], total);
      }
    return __any_sync(0xffffffff, moved);
  }

  /// max * scale, 0 for a row that has seen nothing: its scores are -inf and must not become -inf -
  /// -inf.
  __device__ static __forceinline__ float scaled_max(float max, float scale_log2) {
    return max == -INFINITY ? 0.0f : max * scale_log2;
  }

  /// The sum over a row's lanes.
  __device__ __forceinline__ float row_sum(int m, int half) const {
    float total = sum[m][half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    return total;
  }

  /// Natural log-sum-exp of a row, -inf where nothing was seen.
  __device__ __forceinline__ float lse(int m, int half, float row_sum, float scale_log2) const {
    return row_sum == 0.0f ? -INFINITY
                           : (scaled_max(max[m][half], scale_log2) + log2_approx(row_sum)) * kLn2;
  }
};

/// Weights of two states in their merged one, and its lse. Two empty states make an empty one; a
/// NaN stays NaN.
struct MergeWeights {
  float first;
  float second;
  float lse;

  __device__ __forceinline__ MergeWeights(float lse_first, float lse_second) {
    if (lse_first == -INFINITY && lse_second == -INFINITY) {
      first = second = 0.0f;
      lse = -INFINITY;
      return;
    }
    const float max = fmaxf(lse_first, lse_second);
    first = exp2_approx((lse_first - max) * kLog2E);
    second = exp2_approx((lse_second - max) * kLog2E);
    const float total = first + second;
    lse = max + log2_approx(total) * kLn2;
    first /= total;
    second /= total;
  }
};

}  // namespace ringattn::cuda::sm80
