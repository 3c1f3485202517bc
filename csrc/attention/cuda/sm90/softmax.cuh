// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/cuda/key_bounds.h"
#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm90/lane_columns.cuh"
#include "attention/cuda/sm90/ptx/instruction_order.cuh"

// Online softmax of a warpgroup's scores, in the layout of ptx/wgmma.cuh: a lane holds parts of two
// rows ("halves"), 8 apart; the four lanes of a quad hold a row.

namespace ringattn::cuda::sm90 {

/// A number for each of a lane's two rows.
struct RowPair {
  float of[2];

  __device__ __forceinline__ float operator[](int half) const { return of[half]; }
};
struct RowFlags {
  bool of[2];

  __device__ __forceinline__ bool operator[](int half) const { return of[half]; }
};

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

/// s[i, j] = -inf where key j is not one of those that row i sees.
///   entries    of this lane's rows
///   first_key  of the tile
///   rows       which of the two
template <int kScores>
__device__ __forceinline__ void mask_scores(float (&s)[kScores], const KeyBounds& keys,
                                            const KeyRange (&entries)[2], int first_key,
                                            const RowFlags& rows = {{true, true}}) {
  // Otherwise ptxas clamps the entries in front of the products, which then wait for their loads.
  keep_instructions_in_order();
  const int first_column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Clamped as far as these bits need it.
    const int begin = max(entries[half].begin, 0);
    const int end = max(min(entries[half].end, keys.num_keys), 0);
    const uint32_t visible = columns_within<kScores / 2>(begin - first_column, end - first_column);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      if (rows[half] && (visible >> i & 1) == 0) s[i / 2 * 4 + 2 * half + i % 2] = -INFINITY;
    }
  }
}

/// Whether `mine` is true in any lane of the quad.
__device__ __forceinline__ bool any_in_quad(bool mine) {
  const uint32_t quad = 0xfu << (threadIdx.x % 32 & 28);
  return (__ballot_sync(0xffffffff, mine) & quad) != 0;
}

/// The maximum of each row, in two chains of dependent instructions.
template <int kScores>
__device__ __forceinline__ RowPair row_max(const float (&s)[kScores]) {
  RowPair even = {{-INFINITY, -INFINITY}}, odd = even;
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    even.of[i / 2 % 2] = fmaxf(even[i / 2 % 2], s[i]);
    odd.of[i / 2 % 2] = fmaxf(odd[i / 2 % 2], s[i + 1]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& top = even.of[half];
    top = fmaxf(top, odd[half]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
  }
  return even;
}

template <int kAccumulators>
__device__ __forceinline__ void scale_accumulators(float (&out)[kAccumulators],
                                                   const float (&decay)[2]) {
  if (__all_sync(0xffffffff, decay[0] == 1.0f && decay[1] == 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) out[i] *= decay[i / 2 % 2];
}

/// Accumulators and sums are relative to `max`. In the first tile, and under the mask where rows
/// may see their first keys, it is the largest score so far. In the other tiles it is not looked
/// for, which saves a sixth of all instructions: probabilities are computed relative to the maximum
/// so far, and their sums tell whether a row's scores have risen above it (after FlashAttention-4,
/// which looks for the maximum, but rarely moves it). Such a row is re-centred on its largest
/// probability.
///
/// Note: that is a matter of accuracy first. In a row where one key has most of the weight, the
/// result's error is the rounding error of that key's probability: none where it is 1, up to half a
/// unit in the last place of the 16-bit type where it is not.
struct OnlineSoftmax {
  /// A row is re-centred on a probability that exceeds this share of the row's sum before. A
  /// smaller one's rounding error is at most a quarter of that of the result.
  static constexpr float kDominance = 0.25f;
  static constexpr float kMaxTileSum = 512.0f;        // what float16 holds, with room
  static constexpr float kMaxRecoverable = 0x1p100f;  // a larger sum may have overflowed

  float max[2] = {-INFINITY, -INFINITY};  // of the raw scores or less, the same in a quad
  float sum[2] = {0.0f, 0.0f};            // of this lane's probabilities, relative to max
  float decay[2] = {1.0f, 1.0f};          // what earlier accumulators have to be multiplied by

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
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&s)[kScores], float scale_log2) {
    const RowPair top = row_max(s);
    RowPair offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offset.of[half] = move_max(half, fmaxf(max[half], top[half]), scale_log2);
    }
    add(exponentiate_relative(s, offset, scale_log2));
  }

  /// Scores become probabilities relative to the maxima as they are. Their sums, to be added unless
  /// a row has_risen().
  template <int kScores>
  __device__ __forceinline__ RowPair exponentiate_untested(float (&s)[kScores],
                                                           float scale_log2) const {
    RowPair offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row without a finite maximum, such as one that has seen nothing, has risen.
      const float scaled = __fmul_rn(max[half], scale_log2);
      offset.of[half] = isinf(scaled) ? NAN : scaled;
    }
    return exponentiate_relative(s, offset, scale_log2);
  }

  /// Whether a probability in this lane's part of a row may be one to re-centre on. A NaN is. Rows
  /// without one that dominates pass in nearly all tiles but the second and the third.
  __device__ __forceinline__ bool has_risen(const RowPair& sums, int half) const {
    // A lane has a quarter of a row whose weight is spread.
    constexpr float kLaneDominance = 4.0f * kDominance;
    return !(sums[half] <= fminf(kMaxTileSum, fmaf(kLaneDominance, sum[half], 1.0f)));
  }
  /// Whether either of the lane's rows has.
  __device__ __forceinline__ bool has_risen(const RowPair& sums) const {
    return has_risen(sums, 0) || has_risen(sums, 1);
  }
  /// Rows whose scores cannot be told from their probabilities: the same in a quad.
  static __device__ __forceinline__ RowFlags overflowed(const RowPair& sums) {
    return {
        {any_in_quad(!(sums[0] <= kMaxRecoverable)), any_in_quad(!(sums[1] <= kMaxRecoverable))}};
  }

  /// Rows that have overflowed, whose scores `s` holds again, become probabilities under their new
  /// maxima.
  template <int kScores>
  __device__ __forceinline__ void restart(float (&s)[kScores], RowPair& sums, const RowFlags& rows,
                                          float scale_log2) {
    const RowPair top = row_max(s);
    RowPair offset, total = {{0.0f, 0.0f}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float after = rows[half] ? fmaxf(max[half], top[half]) : max[half];
      offset.of[half] = move_max(half, after, scale_log2);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2;
      if (rows[half]) s[i] = exp2_approx(fmaf(s[i], scale_log2, -offset[half]));
      total.of[half] += s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows[half]) sums.of[half] = total[half];
    }
  }

  /// Rows with a dominating probability become relative to it: it becomes 1. Each row is judged by
  /// its own lanes: no row's bits depend on others.
  template <int kScores, int kAccumulators>
  __device__ __forceinline__ void recentre(float (&s)[kScores], RowPair& sums,
                                           float (&out)[kAccumulators], float scale_log2) {
    const RowPair top = row_max(s);
    RowFlags moves;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool risen = any_in_quad(has_risen(sums, half));
      const float dominant = fminf(kMaxTileSum, fmaxf(kDominance * row_sum(half), 1.0f));
      moves.of[half] = risen && top[half] > dominant;
    }
    if (!__any_sync(0xffffffff, moves[0] || moves[1])) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = max[half] + log2_approx(top[half]) * reciprocal(scale_log2);
      move_max(half, moves[half] && !isinf(raised) ? raised : max[half], scale_log2);
      sums.of[half] *= decay[half];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= decay[i / 2 % 2];
    scale_accumulators(out, decay);
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

  /// A row's accumulators and sum become relative to `after`; what probabilities are then relative
  /// to, in powers of two.
  __device__ __forceinline__ float move_max(int half, float after, float scale_log2) {
    const float offset = scaled_max(after, scale_log2);
    // exp2(-inf) before the first keys; exactly 1 where nothing changes, so no contraction here.
    decay[half] = exp2_approx(__fmul_rn(max[half], scale_log2) - offset);
    sum[half] *= decay[half];
    max[half] = after;
    return offset;
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
template <typename Element, int kFirst = 0, int kScores, int kSize>
__device__ __forceinline__ void round_probabilities(const float (&s)[kScores],
                                                    uint32_t (&p)[kSize]) {
  static_assert(kFirst + kScores / 2 <= kSize);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int from = i - kFirst;
    p[i] = from >= 0 && from < kScores / 2 ? pack<Element>(s[2 * from], s[2 * from + 1]) : 0;
  }
}

}  // namespace ringattn::cuda::sm90
