// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm90/backward/cluster_sum.cuh"
#include "attention/cuda/sm90/backward/kernel_params.h"
#include "attention/cuda/sm90/backward/products.cuh"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/lane_columns.cuh"
#include "attention/cuda/sm90/ptx/instruction_order.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/stmatrix.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/softcap.cuh"

// A consumer warpgroup: dk and dv of its 64 keys, and dq of every other step, a step later. Where a
// mask lets no row of a step see these keys, its score gradients are 0, and it computes dq alone.

namespace ringattn::cuda::sm90 {

/// Makes keys 0 that no row sees: dq is a sum over all keys of the tile, and 0 * NaN is NaN.
template <typename Tile>
__device__ __forceinline__ void clear_unseen_keys(const QueryBounds& bounds, uint32_t keys,
                                                  int first_key) {
  const int row = threadIdx.x % kGradWarpgroup;
  if (row >= kGradRows) return;
  const QueryRange seen = bounds.range(first_key + row);
  if (!seen.empty()) return;
  clear_row(keys, Tile::kColumnBlocks, Tile::kKeyBlockBytes, row);
  fence_async_shared();  // before the barrier of a step
}

/// The thread's accumulators of scores: rows are keys 16 * warp + g and 8 below it, columns are
/// query rows 8 * n + 2t and the next one.
template <typename Tile>
using ScoreTile = float[Tile::kBlockQ / 2];

/// Which of a thread's pairs of a key and a query row the mask lets through.
template <int kSize>
struct VisiblePairs {
  static constexpr int kOfKey = kSize / 2;
  static_assert(kOfKey == 16 || kOfKey == 32);
  uint32_t bits[kSize / 32];

  /// Behind the products that have been issued: entries are waited for here.
  ///   entries    of the thread's two keys
  ///   first_row  of the thread's columns
  __device__ __forceinline__ void set(const QueryBounds& bounds, const QueryRange (&entries)[2],
                                      int first_row) {
    keep_instructions_in_order();
    uint32_t of_key[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRange seen = bounds.clamped(entries[half]);
      of_key[half] = columns_within<kOfKey>(seen.begin - first_row, seen.end - first_row);
    }
    if constexpr (kOfKey == 32) {
      bits[0] = of_key[0], bits[1] = of_key[1];
    } else {
      bits[0] = of_key[0] | of_key[1] << kOfKey;
    }
  }

  /// Replaces what masked pairs have by `value`, selected: what they had may be NaN.
  __device__ __forceinline__ void mask(float (&x)[kSize], float value) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int bit = i / 2 % 2 * kOfKey + i / 4 * 2 + i % 2;
      if ((bits[bit / 32] >> bit % 32 & 1) == 0) x[i] = value;
    }
  }
};

/// The entries of a thread's two keys, 8 apart.
__device__ __forceinline__ void load_entries(const QueryBounds& bounds, int key,
                                             QueryRange (&entries)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) entries[half] = bounds.entry(key + 8 * half);
}

/// s = tanh(inner * s): the capped score in units of the softcap.
template <int kSize>
__device__ __forceinline__ void cap_scores(float (&s)[kSize], float inner) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) s[i] = tanh_by_exp2(inner * s[i]);
}

/// Of a lane's four columns of sixteen, minus lse in powers of two.
struct ColumnLse {
  float4 x;

  /// Of accumulator j of a group of eight: 4 * n + 2 * half + c.
  __device__ __forceinline__ float of(int j) const {
    return j % 8 < 4 ? (j % 2 == 0 ? x.x : x.y) : (j % 2 == 0 ? x.z : x.w);
  }
};

/// minus_lse() of a query tile, as lse_position lays it out.
struct LseReader {
  uint32_t at;  // of the lane's first four columns

  __device__ __forceinline__ explicit LseReader(uint32_t minus_lse)
      : at(minus_lse + volatile_thread() % 4 * 16) {}

  /// Of the lane's columns of sixteen. Note: volatile, so loads stay where they are needed.
  __device__ __forceinline__ ColumnLse operator[](int i) const {
    ColumnLse four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x.x), "=f"(four.x.y), "=f"(four.x.z), "=f"(four.x.w)
                 : "r"(at + 64 * i)
                 : "memory");
    return four;
  }
};

/// p = exp(score - lse), in place of raw scores to which the rows' terms have been added.
template <int kSize>
__device__ __forceinline__ void exponentiate(const BackwardKernelParams& p, float (&s)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) s[i] = exp2_approx(s[i] * p.score_log2);
}

/// p under a softcap.
///   s  the tanh of a score
__device__ __forceinline__ float capped_probability(const BackwardKernelParams& p, float s,
                                                    float minus_lse) {
  return exp2_approx(fmaf(s, p.score_log2, minus_lse));
}

/// The same of all, in place of s.
template <int kSize>
__device__ __forceinline__ void exponentiate_capped(const BackwardKernelParams& p,
                                                    float (&s)[kSize], const LseReader& minus_lse) {
#pragma unroll
  for (int i = 0; i < kSize / 8; ++i) {
    const ColumnLse lse = minus_lse[i];
#pragma unroll
    for (int j = 8 * i; j < 8 * i + 8; ++j) s[j] = capped_probability(p, s[j], lse.of(j));
  }
}

/// ds = p * (dp - delta), in place of dp - delta. Under a softcap times the derivative of tanh.
///   s  p; under a softcap the tanh of the scores, from which p comes once more
template <bool kSoftcap, int kSize>
__device__ __forceinline__ void differentiate(const BackwardKernelParams& p, float (&dp)[kSize],
                                              const float (&s)[kSize], const LseReader& minus_lse) {
#pragma unroll
  for (int i = 0; i < kSize / 8; ++i) {
    [[maybe_unused]] ColumnLse lse;
    if constexpr (kSoftcap) lse = minus_lse[i];
#pragma unroll
    for (int j = 8 * i; j < 8 * i + 8; ++j) {
      float weight = s[j];
      if constexpr (kSoftcap) {
        weight = capped_probability(p, s[j], lse.of(j)) * fmaf(-s[j], s[j], 1.0f);
      }
      dp[j] *= weight;
    }
  }
}

template <typename Element, int kSize>
__device__ __forceinline__ void round_pairs(const float (&x)[kSize],
                                            uint32_t (&rounded)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) rounded[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
}

/// ds.T into [kBlockQ / 64][kBlockK][64], swizzled.
template <typename Tile>
__device__ __forceinline__ void store_score_grads(const uint32_t (&ds)[Tile::kBlockQ / 4],
                                                  uint32_t to, int consumer,
                                                  uint32_t thread = threadIdx.x) {
  const uint32_t lane = thread % 32;
  const uint32_t row = consumer * kGradRows + thread % kGradWarpgroup / 32 * 16 + lane % 16;
  const uint32_t at = to + row * kGradPitch;
#pragma unroll
  for (int j = 0; j < Tile::kBlockQ / 16; ++j) {
    const uint32_t block = j / 4, chunk = j % 4 * 2 + lane / 16;
    store_matrices(at + block * Tile::kKeyBlockBytes + ((chunk ^ row % 8) * 16), ds[4 * j],
                   ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
  }
}

/// ds into [kBlockK / 64][kBlockQ][64], swizzled: the consumer's 64 keys are one of the blocks.
template <typename Tile>
__device__ __forceinline__ void store_transposed_score_grads(
    const uint32_t (&ds)[Tile::kBlockQ / 4], uint32_t to, int consumer) {
  const uint32_t lane = threadIdx.x % 32, matrix = lane / 8;
  const uint32_t row = matrix / 2 * 8 + lane % 8;  // of sixteen query rows
  const uint32_t chunk = threadIdx.x % kGradWarpgroup / 32 * 2 + matrix % 2;  // of eight keys
  const uint32_t at =
      to + consumer * Tile::kQueryBlockBytes + row * kGradPitch + (chunk ^ row % 8) * 16;
#pragma unroll
  for (int j = 0; j < Tile::kBlockQ / 16; ++j) {
    store_transposed_matrices(at + j * 16 * kGradPitch, ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                              ds[4 * j + 3]);
  }
}

/// scale * groups [kBegin, kEnd) of eight columns of dq into [2][64][32], float32, swizzled. Lanes
/// with an odd g store what others store two groups later or earlier: so the lanes of a half warp
/// do not meet in a bank.
template <int kBegin, int kEnd, int kSize>
__device__ __forceinline__ void store_query_grads(const float (&dq)[kSize], float scale,
                                                  uint32_t to, uint32_t thread) {
  const uint32_t lane = thread % 32, g = lane / 4, t = lane % 4;
  const bool odd = g % 2 != 0;
  const uint32_t row = thread % kGradWarpgroup / 32 * 16 + g;
  const uint32_t at = to + row * kGradPitch + t % 2 * 8;
  const uint32_t chunk = (t / 2 ^ g) ^ (odd ? 4 : 0);
#pragma unroll
  for (int n = kBegin; n < kEnd; ++n) {
    const uint32_t block = (n - kBegin) / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 4 * n + 2 * half, other = 4 * (n ^ 2) + 2 * half;
      const float x = odd ? dq[other] : dq[i], y = odd ? dq[other + 1] : dq[i + 1];
      store_shared_pair(at + block * (kGradRows * kGradPitch) + half * 8 * kGradPitch +
                            ((n % 4 * 2) ^ chunk) * 16,
                        make_float2(x * scale, y * scale));
    }
  }
}

/// Hands part kPart of scale * dq to the warp that adds it: column block kBlock of `dq`.
template <typename Tile, int kPart, int kBlock, int kSize>
__device__ __forceinline__ void hand_over_query_grads(const float (&dq)[kSize], float scale,
                                                      const BackwardShared<Tile>& shared) {
  constexpr int kGroups = kGradColumnBlock / 8;
  named_barrier_wait(kDqFreeBarrier + kPart, kDqThreads);
  store_query_grads<kBlock * kGroups, (kBlock + 1) * kGroups>(dq, scale, shared.dq(kPart),
                                                              volatile_thread());
  fence_async_shared();
  named_barrier_arrive(kDqFullBarrier + kPart, kDqThreads);
}

/// dq of a step. Its parts leave under the products that are issued behind it.
///   score_grads  those of both consumers
///   issue_next   issues kNext groups of products
template <typename Element, typename Tile, int kNext = 0, typename IssueNext>
__device__ __forceinline__ void compute_query_grads(const BackwardShared<Tile>& shared,
                                                    uint32_t score_grads, float scale,
                                                    const IssueNext& issue_next) {
  const uint32_t keys = shared.stationary(kScoreOperand);
  float first[Tile::kHeadDim / 2];
  issue_query_grads<Element, Tile>(first, score_grads, keys);
  if constexpr (Tile::kBlockQ == kGradRows) {
    issue_next();
    wait_for_products<kNext>();
    hand_over_query_grads<Tile, 0, 0>(first, scale, shared);
    hand_over_query_grads<Tile, 1, 1>(first, scale, shared);
  } else {
    float second[Tile::kHeadDim / 2];
    issue_query_grads<Element, Tile>(second, score_grads + kGradRows * kGradPitch, keys);
    issue_next();
    wait_for_products<kNext + 1>();
    hand_over_query_grads<Tile, 0, 0>(first, scale, shared);
    wait_for_products<kNext>();
    hand_over_query_grads<Tile, 1, 0>(second, scale, shared);
  }
}

__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
template <typename Element>
__device__ __forceinline__ void store_pair(Element* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = pack<Element>(x, y);
}

/// scale * grads of the thread's keys into x [B, S_k, H_kv, D], the quarters of this rank.
template <typename To, int kFirstQuarter, int kSize>
__device__ __forceinline__ void write_key_grads(const BackwardKernelParams& p, const KeyTile& tile,
                                                int first_key, const OwnedQuarters& owned,
                                                const Strided& x, const float (&grads)[kSize],
                                                float scale) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + 8 * half;
    if (key >= p.bounds.num_keys) continue;
    To* row = static_cast<To*>(x.data) + tile.batch * x.batch_stride + key * x.row_stride +
              tile.kv_head * x.head_stride + column;
#pragma unroll
    for (int n = 0; n < kSize / 4; ++n) {
      if (owned.has(kFirstQuarter + n / (kSize / 8)) && 8 * n + column < p.head_dim) {
        store_pair(row + 8 * n, grads[4 * n + 2 * half] * scale,
                   grads[4 * n + 2 * half + 1] * scale);
      }
    }
  }
}

template <typename Element, typename Tile, bool kSoftcap>
__device__ __forceinline__ void consume_grads(const BackwardKernelParams& p,
                                              const BackwardShared<Tile>& shared, int consumer) {
  // Whether p is rounded under dp: there it needs registers in both types.
  constexpr bool kRoundsEarly = Tile::kBlockQ <= 64 && !kSoftcap;
  constexpr int kAllConsumers = kGradConsumers * kGradWarpgroup;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const uint32_t keys = shared.stationary(kScoreOperand) + consumer * kGradRows * kGradPitch;
  const uint32_t values =
      shared.stationary(kProbabilityOperand) + consumer * kGradRows * kGradPitch;

  const OwnedQuarters owned(p);
  StagePosition<Tile::kQueryStages> queries_at;
  StagePosition<Tile::kGradOutStages> grad_out_at;
  uint32_t score_grads = shared.score_grads(0), score_grads_before = score_grads;
  // In each step one consumer, first one and then the other, computes dq of the step before. When
  // that has left, and its own score gradients of this step are stored, it arrives at its barrier,
  // on which the other waits. Note: so no consumer overwrites a stage that is still read, and dq
  // leaves in the order of steps.
  uint32_t dq_by = 0;  // the consumer, plus 2 where the work tile has a step before
  const auto let_other_go_on = [&] {
    named_barrier_arrive(kStepBarrier + consumer, kAllConsumers);
  };
  const auto wait_for_other = [&] {
    named_barrier_wait(kStepBarrier + 1 - consumer, kAllConsumers);
  };
  uint32_t tile_parity = 0;
  // The first of a thread's two keys; the other is 8 behind it.
  const auto first_key_of_thread = [&](const KeyTile& tile) {
    return tile.first_key + consumer * kGradRows + key_of_thread(volatile_thread());
  };
  const auto free_stage = [&](GradOperand operand, uint32_t stage) {
    __syncwarp();
    if (is_first_lane) arrive(shared.free(operand, stage));
  };

  for_each_key_tile<Tile, false>(p, shared, [&](const KeyTile& tile) {
    float dk[Tile::kHeadDim / 2] = {}, dv[Tile::kHeadDim / 2] = {};
    if (!tile.empty()) {
      wait(shared.stationary_full(kScoreOperand), tile_parity);
      wait(shared.stationary_full(kProbabilityOperand), tile_parity);
      tile_parity ^= 1;
      clear_unseen_keys<Tile>(p.bounds, keys, tile.first_key + consumer * kGradRows);
      const VisibleTiles visible =
          visible_tiles<Tile::kBlockQ, kGradRows>(p.bounds, tile.first_key + consumer * kGradRows);
      Step step(tile);
      const auto end_step = [&] {
        queries_at.advance();
        grad_out_at.advance();
        dq_by = 3 - dq_by % 2;
        score_grads_before = score_grads;
        score_grads = score_grads == shared.score_grads(Tile::kScoreGradStages - 1)
                          ? shared.score_grads(0)
                          : score_grads + Tile::kScoreGradBytes;
        step.template advance<Tile>(tile, p.heads_per_rank);
      };
      const auto computes_dq_before = [&] { return dq_by == static_cast<uint32_t>(consumer) + 2; };
      const auto computes_first_dq = [&] { return dq_by == static_cast<uint32_t>(consumer); };
      const auto take_step = [&](auto masked) {
        const uint32_t queries = shared.moving(kScoreOperand, queries_at.stage);
        const uint32_t grad_out = shared.moving(kProbabilityOperand, grad_out_at.stage);

        ScoreTile<Tile> s, dp;
        QueryRange entries[2];
        VisiblePairs<Tile::kBlockQ / 2> pairs;
        if (masked) load_entries(p.bounds, first_key_of_thread(tile), entries);
        issue_transposed_scores<Element, Tile, kSoftcap>(shared, queries_at, grad_out_at, keys,
                                                         values, s, dp);
        const LseReader minus_lse(shared.minus_lse(queries_at.stage));  // of a softcap
        uint32_t probabilities[Tile::kBlockQ / 4], ds[Tile::kBlockQ / 4];
        if (masked) {
          const int first_row = step.query_tile * Tile::kBlockQ + volatile_thread() % 4 * 2;
          pairs.set(p.bounds, entries, first_row);
        }

        // p = exp(s - lse), under dp.
        wait_for_products<1>();
        if constexpr (kSoftcap) cap_scores(s, p.softcap_inner);
        if (masked) pairs.mask(s, p.masked_score);
        if constexpr (!kSoftcap) exponentiate(p, s);
        if constexpr (kRoundsEarly) round_pairs<Element>(s, probabilities);

        // ds = p * (dp - delta)
        wait_for_products<0>();
        differentiate<kSoftcap>(p, dp, s, minus_lse);
        if (masked) pairs.mask(dp, 0.0f);
        if constexpr (kSoftcap) exponentiate_capped(p, s, minus_lse);
        if constexpr (!kRoundsEarly) round_pairs<Element>(s, probabilities);
        round_pairs<Element>(dp, ds);
        constexpr bool kUnderDk = Tile::kBlockQ == kGradRows;
        // With two stages, the other may still read the one that is stored into next.
        constexpr bool kStoresBehind = Tile::kScoreGradStages == 2;
        static_assert(kUnderDk || kStoresBehind);  // else nothing waits for the other
        const bool computes_dq = computes_dq_before();
        if (kStoresBehind && computes_dq) wait_for_other();
        store_transposed_score_grads<Tile>(ds, score_grads, consumer);
        issue_key_grads<Element, Tile>(dv, probabilities, grad_out);
        fence_async_shared();
        const auto issue_dk = [&] { issue_key_grads<Element, Tile>(dk, ds, queries); };
        if (kUnderDk && computes_dq) {
          if (!kStoresBehind) wait_for_other();
          wait_for_products<0>();
          free_stage(kProbabilityOperand, grad_out_at.stage);
          compute_query_grads<Element, Tile, 1>(shared, score_grads_before, p.scale, issue_dk);
          let_other_go_on();
        } else {
          if (computes_first_dq()) let_other_go_on();
          issue_dk();
          wait_for_products<1>();
          free_stage(kProbabilityOperand, grad_out_at.stage);
        }
        wait_for_products<0>();
        free_stage(kScoreOperand, queries_at.stage);
        if (!kUnderDk && computes_dq) {
          compute_query_grads<Element, Tile>(shared, score_grads_before, p.scale, [] {});
          let_other_go_on();
        }
        end_step();
      };
      // A step whose rows see none of the consumer's keys. Note: no waits for products, of which
      // there are none: ptxas would part the products of other steps (C7512).
      const auto skip_step = [&] {
        wait(shared.full(kScoreOperand, queries_at.stage), queries_at.parity);
        wait(shared.full(kProbabilityOperand, grad_out_at.stage), grad_out_at.parity);
        free_stage(kScoreOperand, queries_at.stage);
        free_stage(kProbabilityOperand, grad_out_at.stage);
        store_transposed_score_grads<Tile>({}, score_grads, consumer);
        fence_async_shared();
        if (computes_dq_before()) {
          wait_for_other();
          compute_query_grads<Element, Tile>(shared, score_grads_before, p.scale, [] {});
          let_other_go_on();
        } else if (computes_first_dq()) {
          let_other_go_on();
        }
        end_step();
      };
#pragma unroll 1
      for (int left = tile.steps(p.heads_per_rank); left > 0; --left) {
        const bool masked = visible.all.lack(step.query_tile);
        // Steps without a mask have code of their own: no branch parts their instructions.
        if (Tile::kSkipsSteps && masked && visible.some.lack(step.query_tile)) {
          skip_step();
        } else if (masked) {
          take_step(std::true_type{});
        } else {
          take_step(std::false_type{});
        }
      }
      // dq of the last step: before the sum over the cluster, which may overwrite stages of ds.
      dq_by %= 2;
      if (computes_first_dq()) {
        wait_for_other();
        compute_query_grads<Element, Tile>(shared, score_grads_before, p.scale, [] {});
      }
      if (p.ranks > 1) {
        sum_over_cluster(shared, owned, p.ranks, tile_parity ^ 1, dk, dv);
      }
      __syncwarp();
      if (is_first_lane) arrive(shared.stationary_free());
    }
    const int first_key = first_key_of_thread(tile);
    const auto write = [&](auto* type) {
      using To = std::remove_pointer_t<decltype(type)>;
      write_key_grads<To, 0>(p, tile, first_key, owned, p.dk, dk, p.scale);
      write_key_grads<To, 2>(p, tile, first_key, owned, p.dv, dv, 1.0f);
    };
    if (p.rounds_key_grads) {
      write(static_cast<Element*>(nullptr));
    } else {
      write(static_cast<float*>(nullptr));
    }
  });
}

}  // namespace ringattn::cuda::sm90
