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
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/instruction_order.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/stmatrix.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/softcap.cuh"

// A consumer warpgroup: dk and dv of its 64 keys, and dq of every other step, a step later. Where a
// mask lets no row of a step see these keys, its score gradients are 0, and it computes dq alone.

namespace ringattn::cuda::sm90 {

__device__ __forceinline__ void arrive_for_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

/// In both thread blocks of the pair.
__device__ __forceinline__ void arrive_in_pair(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    arrive(barrier);
    arrive_in_cluster(address_in_rank(barrier, rank_in_pair() ^ 1));
  }
}

/// Makes keys 0 that no row sees: dq is a sum over all keys of the tile, and 0 * NaN is NaN. Of a
/// pair also those of the other half.
///   first_key  of the thread block's half
template <typename Tile>
__device__ __forceinline__ void clear_unseen_keys(const QueryBounds& bounds,
                                                  const BackwardShared<Tile>& shared, int first_key,
                                                  int consumer) {
  const int row = consumer * kGradRows + threadIdx.x % kGradRows;
  const bool of_other = threadIdx.x % kGradWarpgroup >= kGradRows;
  if (of_other && !Tile::kPair) return;
  if (!bounds.range((of_other ? first_key ^ Tile::kBlockK : first_key) + row).empty()) return;
  clear_row(of_other ? shared.other_keys() : shared.stationary(kScoreOperand),
            of_other ? Tile::kOtherKeyBlocks : Tile::kColumnBlocks, Tile::kKeyBlockBytes, row);
  fence_async_shared();  // before score gradients are published
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

/// scale * groups [kBegin, kEnd) of eight columns of dq into blocks of [64][32], float32, swizzled.
/// Lanes with an odd g store what others store two groups later or earlier: so the lanes of a half
/// warp do not meet in a bank.
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

/// Hands part kPart of scale * dq to the warp that adds it: columns of `dq`.
template <typename Tile, int kPart, int kFirstColumn, int kSize>
__device__ __forceinline__ void hand_over_query_grads(const float (&dq)[kSize], float scale,
                                                      const BackwardShared<Tile>& shared) {
  constexpr int kBegin = kFirstColumn / 8, kEnd = kBegin + Tile::kPartColumns / 8;
  named_barrier_wait(kDqFreeBarrier + kPart, kDqThreads);
  store_query_grads<kBegin, kEnd>(dq, scale, shared.dq(kPart), volatile_thread());
  fence_async_shared();
  named_barrier_arrive(kDqFullBarrier + kPart, kDqThreads);
}

/// dq of a step: in a pair half of its columns. Its parts leave under the products that are issued
/// behind it.
///   at          the stage of score gradients
///   issue_next  issues kNext groups of products
template <typename Element, typename Tile, int kNext = 0, typename IssueNext>
__device__ __forceinline__ void compute_query_grads(const BackwardShared<Tile>& shared,
                                                    const StagePosition<Tile::kScoreGradStages>& at,
                                                    float scale, const IssueNext& issue_next) {
  const uint32_t score_grads = shared.score_grads(at.stage);
  const uint32_t keys = shared.stationary(kScoreOperand);
  if constexpr (Tile::kBlockQ == kGradRows) {
    float dq[Tile::kPartColumns];  // of two parts
    if constexpr (Tile::kPair) {
      wait(shared.other_score_grads_full(at.stage), at.parity);
      issue_query_grads_of_pair<Element, Tile>(
          dq, score_grads, keys + rank_in_pair() * Tile::kOtherKeyBytes,
          shared.other_score_grads(at.stage), shared.other_keys());
    } else {
      issue_query_grads<Element, Tile>(dq, score_grads, keys);
    }
    issue_next();
    wait_for_products<kNext>();
    if constexpr (Tile::kPair) arrive_in_pair(shared.score_grads_free(at.stage));
    hand_over_query_grads<Tile, 0, 0>(dq, scale, shared);
    hand_over_query_grads<Tile, 1, Tile::kPartColumns>(dq, scale, shared);
  } else {
    float first[Tile::kHeadDim / 2], second[Tile::kHeadDim / 2];
    issue_query_grads<Element, Tile>(first, score_grads, keys);
    issue_query_grads<Element, Tile>(second, score_grads + kGradRows * kGradPitch, keys);
    issue_next();
    wait_for_products<kNext + 1>();
    hand_over_query_grads<Tile, 0, 0>(first, scale, shared);
    wait_for_products<kNext>();
    hand_over_query_grads<Tile, 1, 0>(second, scale, shared);
  }
}

/// Sends the score gradients of 64 keys to the other thread block of the pair, whose stage is free
/// when this one's is. By all threads of a warpgroup, which have stored them and fenced.
///   consumer  whose keys they are; of split roles 0
template <typename Tile>
__device__ __forceinline__ void send_score_grads(const BackwardShared<Tile>& shared, uint32_t stage,
                                                 int consumer) {
  constexpr int kBytes = Tile::kQueryBlockBytes;
  named_barrier_wait(kSendBarrier + consumer, kGradWarpgroup);
  if (threadIdx.x % kGradWarpgroup != 0) return;
  const uint32_t other = rank_in_pair() ^ 1, part = consumer * kBytes;
  const uint32_t full = shared.other_score_grads_full(stage);
  arrive_expecting(full, kBytes);  // as much comes here
  send_bytes(address_in_rank(shared.other_score_grads(stage) + part, other),
             shared.score_grads(stage) + part, kBytes, address_in_rank(full, other));
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
  const uint32_t keys = shared.stationary(kScoreOperand) + consumer * kGradRows * kGradPitch;
  const uint32_t values =
      shared.stationary(kProbabilityOperand) + consumer * kGradRows * kGradPitch;

  const OwnedQuarters owned(p);
  StagePosition<Tile::kQueryStages> queries_at;
  StagePosition<Tile::kGradOutStages> grad_out_at;
  StagePosition<Tile::kScoreGradStages> score_grads_at, score_grads_before;
  // In each step one consumer, first one and then the other, computes dq of the step before. When
  // that has left, and its own score gradients of this step are stored, it arrives at its barrier,
  // on which the other waits. Note: so no consumer overwrites a stage that is still read (in a pair
  // score_grads_free says so), and dq leaves in the order of steps.
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
    arrive_for_warp(shared.free(operand, stage));
  };

  for_each_key_tile<Tile, false>(p, shared, [&](const KeyTile& tile) {
    float dk[Tile::kHeadDim / 2] = {}, dv[Tile::kHeadDim / 2] = {};
    if (!tile.empty()) {
      wait(shared.stationary_full(kScoreOperand), tile_parity);
      wait(shared.stationary_full(kProbabilityOperand), tile_parity);
      tile_parity ^= 1;
      clear_unseen_keys<Tile>(p.bounds, shared, tile.first_key, consumer);
      const VisibleTiles visible =
          visible_tiles<Tile::kBlockQ, kGradRows>(p.bounds, tile.first_key + consumer * kGradRows);
      Step step(tile);
      const auto end_step = [&] {
        queries_at.advance();
        grad_out_at.advance();
        dq_by = 3 - dq_by % 2;
        score_grads_before = score_grads_at;
        score_grads_at.advance();
        step.template advance<Tile>(tile, p.heads_per_rank);
      };
      // A pair's stages may still be read in both thread blocks.
      const auto publish_score_grads = [&](const uint32_t(&ds)[Tile::kBlockQ / 4],
                                           const auto& issue_next) {
        const uint32_t stage = score_grads_at.stage;
        if constexpr (Tile::kPair) wait(shared.score_grads_free(stage), score_grads_at.parity ^ 1);
        store_transposed_score_grads<Tile>(ds, shared.score_grads(stage), consumer);
        issue_next();
        fence_async_shared();
        if constexpr (Tile::kPair) send_score_grads<Tile>(shared, stage, consumer);
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
        constexpr bool kStoresBehind = Tile::kScoreGradStages == 2 && !Tile::kPair;
        static_assert(kUnderDk || kStoresBehind);  // else nothing waits for the other
        const bool computes_dq = computes_dq_before();
        if (kStoresBehind && computes_dq) wait_for_other();
        publish_score_grads(ds,
                            [&] { issue_key_grads<Element, Tile>(dv, probabilities, grad_out); });
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
        publish_score_grads({}, [] {});
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
      arrive_for_warp(shared.stationary_free());
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
