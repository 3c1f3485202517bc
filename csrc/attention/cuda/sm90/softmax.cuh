// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm90/ptx/instruction_order.cuh"

// Online softmax of a warpgroup's scores, in the layout of ptx/wgmma.cuh: a lane holds parts of two
// rows ("halves"), 8 apart; the four lanes of a quad hold a row.

namespace ringattn::cuda::sm90 {

/// s[i, j] = -inf where key j is past the last one row i sees. Scores are replaced, not added to: a
/// NaN behind the mask stays there.
///   last_key: of this lane's first row, relative to the tile's first key
///   num_keys: of the tensor, relative to the tile's first key
template <int kScores>
__device__ __forceinline__ void mask_scores(float (&s)[kScores], int last_key, int num_keys) {
  const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int last = min(last_key + 8 * half, num_keys - 1) - first_column;
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * n + c > last) s[4 * n + 2 * half + c] = -INFINITY;
      }
  }
}

/// Of the two rows of which a lane holds parts.
struct RowPair {
  float of[2];

  __device__ __forceinline__ float operator[](int half) const { return of[half]; }
};

/// Accumulators and sums are relative to `max`, which follows the scores at a distance: where it is
/// looked for, once they are kSlack powers of two above it (after FlashAttention-4). Where it is
/// not looked for, scores are taken to stay close to it, and the sums of their probabilities tell
/// whether they do. Probabilities are larger for it, which no 16-bit type minds. But the largest is
/// no longer 1, of which nothing is rounded away: errors grow with the distance, if slowly.
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;
  static constexpr float kMostOfLane = 512.0f;  // a row's sum, of a tile

  float max[2] = {-INFINITY, -INFINITY};  // of the raw scores or a little less, the same in a quad
  float sum[2] = {0.0f, 0.0f};            // of this lane's probabilities, relative to max
  float decay[2] = {1.0f, 1.0f};          // what earlier accumulators have to be multiplied by

  /// The maxima with these scores. Those before.
  template <int kScores>
  __device__ __forceinline__ RowPair raise_max(const float (&s)[kScores]) {
    const RowPair before = {{max[0], max[1]}};
#pragma unroll
    for (int i = 0; i < kScores; ++i) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], s[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = fmaxf(max[half], __shfl_xor_sync(0xffffffff, max[half], 1));
      max[half] = fmaxf(max[half], __shfl_xor_sync(0xffffffff, max[half], 2));
    }
    return before;
  }

  /// Scores become probabilities relative to `offset`. Their sums.
  ///
  /// Note: an exponential comes back after some thirty cycles, in which its unit takes three more.
  /// The compiler would add each one after the next, and wait. So those of one group are added
  /// while the next group is under way.
  template <int kScores>
  static __device__ __forceinline__ RowPair exponentiate_relative(float (&s)[kScores],
                                                                  const RowPair& offset,
                                                                  float scale_log2) {
    constexpr int kGroup = 8;
    static_assert(kScores % kGroup == 0);
    RowPair total = {{0.0f, 0.0f}};
#pragma unroll
    for (int begin = 0; begin <= kScores; begin += kGroup) {
      if (begin > 0) keep_instructions_in_order();
#pragma unroll
      for (int i = begin; i < begin + kGroup; ++i) {
        // fmaxf drops a NaN, this does not: it stays in the probability and in the sum.
        if (i < kScores) s[i] = exp2_approx(fmaf(s[i], scale_log2, -offset[i / 2 % 2]));
        if (i >= kGroup) total.of[(i - kGroup) / 2 % 2] += s[i - kGroup];
      }
    }
    return total;
  }

  /// Scores raise the maxima, become probabilities, and are added to the sums.
  ///   slack: how far maxima may have risen to be left where they were, in powers of two
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&s)[kScores], float scale_log2,
                                               RowPair slack = {{kSlack, kSlack}}) {
    const RowPair before = raise_max(s);
    RowPair offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Negated, for rows that have seen nothing: -inf - -inf.
      if (!((max[half] - before[half]) * scale_log2 > slack[half])) max[half] = before[half];
      offset.of[half] = scaled_max(max[half], scale_log2);
      // exp2(-inf) before the first keys; exactly 1 where nothing changes, so no contraction here.
      decay[half] = exp2_approx(__fmul_rn(before[half], scale_log2) - offset[half]);
    }
    const RowPair sums = exponentiate_relative(s, offset, scale_log2);
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = fmaf(sum[half], decay[half], sums[half]);
  }

  /// Scores become probabilities relative to the maxima as they are. Their sums: if they hold(), to
  /// be added; if not, nothing has happened but that the scores are lost.
  template <int kScores>
  __device__ __forceinline__ RowPair exponentiate_untested(float (&s)[kScores],
                                                           float scale_log2) const {
    // Under maxima that were raised without slack sums hold: no tile fails for what another one
    // has brought.
    static_assert(kScores / 2 <= kMostOfLane);
    RowPair offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Without a maximum that is finite, as of a row that has seen nothing, its sum does not hold.
      const float scaled = __fmul_rn(max[half], scale_log2);
      offset.of[half] = isinf(scaled) ? NAN : scaled;
    }
    return exponentiate_relative(s, offset, scale_log2);
  }
  static __device__ __forceinline__ bool hold(const RowPair& sums) {
    return sums[0] <= kMostOfLane && sums[1] <= kMostOfLane;  // a NaN does not
  }
  /// With which maxima are raised where some sums do not hold: rows whose own do keep theirs, so
  /// that no row's bits depend on others.
  static __device__ __forceinline__ RowPair slack_of(const RowPair& sums) {
    RowPair slack;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t hold = __ballot_sync(0xffffffff, sums[half] <= kMostOfLane);
      const uint32_t quad = 0xfu << (threadIdx.x % 32 & 28);
      slack.of[half] = (hold & quad) == quad ? INFINITY : 0.0f;
    }
    return slack;
  }
  __device__ __forceinline__ void add(const RowPair& sums) {
    sum[0] += sums[0];
    sum[1] += sums[1];
  }

  /// max * scale, 0 for a row that has seen nothing: its scores are -inf and must not become -inf -
  /// -inf.
  static __device__ __forceinline__ float scaled_max(float max, float scale_log2) {
    return max == -INFINITY ? 0.0f : __fmul_rn(max, scale_log2);
  }

  /// The sum over a row's lanes.
  __device__ __forceinline__ float row_sum(int half) const {
    float total = sum[half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    return total;
  }

  /// Natural log-sum-exp of a row, -inf where nothing was seen: log2(0).
  __device__ __forceinline__ float lse(int half, float row_sum, float scale_log2) const {
    return (scaled_max(max[half], scale_log2) + log2_approx(row_sum)) * kLn2;
  }
};

/// Probabilities rounded, as the left operand of p @ v: the layout of scores is that of operands.
template <typename Element, int kScores>
__device__ __forceinline__ void round_probabilities(const float (&s)[kScores],
                                                    uint32_t (&p)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
}

template <int kAccumulators>
__device__ __forceinline__ void scale_accumulators(float (&out)[kAccumulators],
                                                   const float (&decay)[2]) {
  if (__all_sync(0xffffffff, decay[0] == 1.0f && decay[1] == 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) out[i] *= decay[i / 2 % 2];
}

}  // namespace ringattn::cuda::sm90
