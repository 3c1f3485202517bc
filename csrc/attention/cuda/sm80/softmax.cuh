// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfloat>
#include <cmath>

#include "attention/cuda/key_bounds.h"
#include "attention/cuda/numeric.cuh"
#include "attention/cuda/softcap.cuh"

// Online softmax over tiles of scores laid out as products.cuh says: a lane holds parts of 2 * kM
// rows, and the four lanes of a quad hold a row.

namespace ringattn::cuda::sm80 {

/// |scale| * log2(e), away from 0 so that a masked score (-inf) times it is -inf. Queries carry the
/// sign.
__device__ __forceinline__ float scale_in_powers_of_two(float scale) {
  return fmaxf(fabsf(scale) * kLog2E, FLT_MIN);
}

/// s[i, j] = -inf where key j is past the last one row i sees. Scores are replaced, not added to: a
/// NaN behind the mask stays there. Relative to the tile's first key, last_key is the last one that
/// this lane's first row sees, each row after it seeing one more, and num_keys where the keys end.
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

/// The same for rows that see keys of one interval each, this lane's rows those of `ranges`.
///   first_key: of the tile
template <int kM, int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kM][kTiles][4],
                                            const KeyRange (&ranges)[kM][2], int first_key) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = ranges[m][half].begin - first_key - 2 * t;
      const int end = ranges[m][half].end - first_key - 2 * t;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c < begin || 8 * n + c >= end) s[m][n][2 * half + c] = -INFINITY;
        }
    }
}

/// Raw scores become the arguments of the softmax that `softcap` says.
template <int kM, int kTiles>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kTiles][4], const Softcap& softcap) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[m][n][c] = softcap(s[m][n][c]);
}

template <int kM>
struct OnlineSoftmax {
  float max[kM][2];  // of the raw scores, the same in a quad
  float sum[kM][2];  // of the probabilities of this lane alone, relative to max

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      max[m][0] = max[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  /// Scores become probabilities; decay is what earlier accumulators have to be multiplied by.
  template <int kTiles>
  __device__ __forceinline__ void update(float (&s)[kM][kTiles][4], float scale_log2,
                                         float (&decay)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = max[m][half];
        float now = before;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          now = fmaxf(now, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 2));
        const float offset = scaled_max(now, scale_log2);
        // exp2(-inf) before the first keys; exactly 1 where nothing changes: no contraction here.
        decay[m][half] = exp2_approx(__fmul_rn(before, scale_log2) - offset);
        max[m][half] = now;
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
  }

  /// max * scale, 0 for a row that has seen nothing: its scores must not become -inf + inf.
  __device__ static __forceinline__ float scaled_max(float max, float scale_log2) {
    return max == -INFINITY ? 0.0f : __fmul_rn(max, scale_log2);
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

}  // namespace ringattn::cuda::sm80
