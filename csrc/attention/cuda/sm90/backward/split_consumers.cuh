// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/cuda/sm90/backward/consumer.cuh"
#include "attention/cuda/sm90/backward/kernel_params.h"
#include "attention/cuda/sm90/backward/products.cuh"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/registers.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

// Split roles, of D 256: dk and dv of 64 keys fill the registers of a warpgroup each. One warpgroup
// computes p and ds and runs ahead; one consumer has dv, the other dk, and each 64 columns of dq.
//
// Adds into dq are what bounds a kernel of 64 keys: two thread blocks, a pair, have 128.

namespace ringattn::cuda::sm90 {

/// scale * grads of the thread's keys into x [B, S_k, H_kv, D].
template <typename To, int kParts>
__device__ __forceinline__ void write_key_grads(const BackwardKernelParams& p, const KeyTile& tile,
                                                const Strided& x, const float (&grads)[kParts][64],
                                                float scale) {
  const int thread = volatile_thread(), column = thread % 4 * 2;
  const int first_key = tile.first_key + key_of_thread(thread);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + 8 * half;
    if (key >= p.bounds.num_keys) continue;
    To* row = static_cast<To*>(x.data) + tile.batch * x.batch_stride + key * x.row_stride +
              tile.kv_head * x.head_stride + column;
#pragma unroll
    for (int n = 0; n < kParts * 16; ++n) {
      if (8 * n + column < p.head_dim) {
        const float* pair = &grads[n / 16][n % 16 * 4 + 2 * half];
        store_pair(row + 8 * n, pair[0] * scale, pair[1] * scale);
      }
    }
  }
}

template <typename Tile, GradOperand kOperand>
using WeightsPosition =
    StagePosition<kOperand == kScoreOperand ? Tile::kScoreGradStages : Tile::kProbabilityStages>;

/// p.T and ds.T of each step into shared memory.
template <typename Element, typename Tile, bool kSoftcap>
__device__ __forceinline__ void compute_weights(const BackwardKernelParams& p,
                                                const BackwardShared<Tile>& shared) {
  const uint32_t keys = shared.stationary(kScoreOperand);
  const uint32_t values = shared.stationary(kProbabilityOperand);
  uint32_t steps = 0;  // so far
  uint32_t tile_parity = 0;

  for_each_key_tile<Tile, false>(p, shared, [&](const KeyTile& tile) {
    if (tile.empty()) return;
    wait(shared.stationary_full(kScoreOperand), tile_parity);
    wait(shared.stationary_full(kProbabilityOperand), tile_parity);
    tile_parity ^= 1;
    clear_unseen_keys<Tile>(p.bounds, shared, tile.first_key, 0);
    const QueryTiles unmasked = tiles_within<Tile::kBlockQ>(
        visible_by_all<Tile::kBlockK>(p.bounds, tile.first_key), p.bounds.num_queries);
    Step step(tile);
#pragma unroll 1
    for (int left = tile.steps(p.heads_per_rank); left > 0; --left) {
      const bool masked = unmasked.lack(step.query_tile);
      const auto queries_at = StagePosition<Tile::kQueryStages>::of(steps);
      const auto grad_out_at = StagePosition<Tile::kGradOutStages>::of(steps);
      const auto publish = [&](auto operand, const uint32_t(&rounded)[Tile::kBlockQ / 4]) {
        const auto at = WeightsPosition<Tile, operand>::of(steps);
        wait(shared.weights_free(operand, at.stage), at.parity ^ 1);
        store_score_grads<Tile>(rounded, shared.weights(operand, at.stage), 0, volatile_thread());
        fence_async_shared();
        arrive_for_warp(shared.weights_full(operand, at.stage));
      };
      constexpr std::integral_constant<GradOperand, kScoreOperand> kScoreGrads;
      constexpr std::integral_constant<GradOperand, kProbabilityOperand> kProbabilities;

      ScoreTile<Tile> s, dp;
      QueryRange entries[2];
      VisiblePairs<Tile::kBlockQ / 2> pairs;
      if (masked) {
        load_entries(p.bounds, tile.first_key + key_of_thread(volatile_thread()), entries);
      }
      issue_transposed_scores<Element, Tile, kSoftcap>(shared, queries_at, grad_out_at, keys,
                                                       values, s, dp);
      const LseReader minus_lse(shared.minus_lse(queries_at.stage));  // of a softcap

      uint32_t rounded[Tile::kBlockQ / 4];
      if (masked) {
        pairs.set(p.bounds, entries, step.query_tile * Tile::kBlockQ + volatile_thread() % 4 * 2);
      }

      // p = exp(s - lse), under dp.
      wait_for_products<1>();
      if constexpr (kSoftcap) cap_scores(s, p.softcap_inner);
      if (masked) pairs.mask(s, p.masked_score);
      if constexpr (!kSoftcap) {
        exponentiate(p, s);
        round_pairs<Element>(s, rounded);
        publish(kProbabilities, rounded);
      }

      // ds = p * (dp - delta)
      wait_for_products<0>();
      differentiate<kSoftcap>(p, dp, s, minus_lse);
      if (masked) pairs.mask(dp, 0.0f);
      if constexpr (kSoftcap) {
        exponentiate_capped(p, s, minus_lse);
        round_pairs<Element>(s, rounded);
        publish(kProbabilities, rounded);
      }
      arrive_for_warp(shared.free(kScoreOperand, queries_at.stage));
      arrive_for_warp(shared.free(kProbabilityOperand, grad_out_at.stage));
      round_pairs<Element>(dp, rounded);
      publish(kScoreGrads, rounded);
      send_score_grads<Tile>(shared, /*stage=*/0, /*consumer=*/0);

      ++steps;
      step.template advance<Tile>(tile, p.heads_per_rank);
    }
    arrive_for_warp(shared.stationary_free());
  });
}

/// dk (kScoreOperand) or dv of a tile's keys, and 64 columns of dq.
template <GradOperand kOperand, typename Element, typename Tile>
__device__ __forceinline__ void sum_key_grads(const BackwardKernelParams& p,
                                              const BackwardShared<Tile>& shared) {
  constexpr bool kIsDk = kOperand == kScoreOperand;
  constexpr int kConsumer = kIsDk;
  // The columns of dq, in all keys of the pair.
  const uint32_t other_keys = shared.other_keys() + kConsumer * Tile::kKeyBlockBytes;
  const uint32_t keys = shared.stationary(kScoreOperand) +
                        (kGradConsumers * rank_in_pair() + kConsumer) * Tile::kKeyBlockBytes;
  uint32_t steps = 0;  // so far
  uint32_t tile_parity = 0;

  for_each_key_tile<Tile, false>(p, shared, [&](const KeyTile& tile) {
    float grads[Tile::kHeadDim / 128][64] = {};
    if (!tile.empty()) {
      wait(shared.stationary_full(kScoreOperand), tile_parity);
      tile_parity ^= 1;
#pragma unroll 1
      for (int left = tile.steps(p.heads_per_rank); left > 0; --left) {
        const auto moving_at = StagePosition<BackwardShared<Tile>::stages(kOperand)>::of(steps);
        const auto weights_at = WeightsPosition<Tile, kOperand>::of(steps);
        const uint32_t moving = shared.moving(kOperand, moving_at.stage);
        const uint32_t weights = shared.weights(kOperand, weights_at.stage);
        float dq[kGradColumnBlock / 2];

        wait(shared.full(kOperand, moving_at.stage), moving_at.parity);
        wait(shared.weights_full(kOperand, weights_at.stage), weights_at.parity);
        if constexpr (!kIsDk) {
          issue_key_grads<Element, Tile>(grads, weights, moving);
          wait_for_products<0>();
          arrive_for_warp(shared.free(kOperand, moving_at.stage));
          arrive_for_warp(shared.weights_free(kOperand, weights_at.stage));
          wait(shared.weights_full(kScoreOperand, 0), steps % 2);
        }
        wait(shared.other_score_grads_full(0), steps % 2);
        issue_query_grads_of_transposed<Element, Tile, false>(dq, shared.weights(kScoreOperand, 0),
                                                              keys);
        issue_query_grads_of_transposed<Element, Tile, true>(dq, shared.other_score_grads(0),
                                                             other_keys);
        if constexpr (kIsDk) {
          issue_key_grads<Element, Tile>(grads, weights, moving);
          wait_for_products<1>();
        } else {
          wait_for_products<0>();
          arrive_in_pair(shared.weights_free(kScoreOperand, 0));
        }

        // Addresses would take registers from step to step.
        const uint32_t thread = volatile_thread();
        named_barrier_wait(kDqFreeBarrier + kConsumer, kDqThreads);
        store_query_grads<0, 4>(dq, p.scale, shared.dq(kConsumer), thread);
        fence_async_shared();
        named_barrier_arrive(kDqFullBarrier + kConsumer, kDqThreads);
        if constexpr (kIsDk) {
          wait_for_products<0>();
          arrive_for_warp(shared.free(kOperand, moving_at.stage));
          arrive_in_pair(shared.weights_free(kScoreOperand, 0));
        }
        named_barrier_wait(kDqFreeBarrier + kConsumer, kDqThreads);
        store_query_grads<4, 8>(dq, p.scale, shared.dq(kConsumer), thread);
        fence_async_shared();
        named_barrier_arrive(kDqFullBarrier + kConsumer, kDqThreads);

        ++steps;
      }
      arrive_for_warp(shared.stationary_free());
    }
    const Strided& to = kIsDk ? p.dk : p.dv;
    const float scale = kIsDk ? p.scale : 1.0f;
    if (p.rounds_key_grads) {
      write_key_grads<Element>(p, tile, to, grads, scale);
    } else {
      write_key_grads<float>(p, tile, to, grads, scale);
    }
  });
}

template <typename Element, typename Tile, bool kSoftcap>
__device__ __forceinline__ void split_consumers(const BackwardKernelParams& p,
                                                const BackwardShared<Tile>& shared, int role) {
  if (role == 0) {
    take_registers<Tile::kConsumerRegisters>();
    sum_key_grads<kProbabilityOperand, Element, Tile>(p, shared);
  } else if (role == 1) {
    take_registers<Tile::kConsumerRegisters>();
    sum_key_grads<kScoreOperand, Element, Tile>(p, shared);
  } else {
    release_registers<Tile::kScoreRegisters>();
    compute_weights<Element, Tile, kSoftcap>(p, shared);
  }
}

}  // namespace ringattn::cuda::sm90
