// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm90/backward/kernel_params.h"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/backward/turns.cuh"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

// The copying warpgroup: two warps load, two add the consumers' parts of dq.

namespace ringattn::cuda::sm90 {

/// Within the group of a KV head.
__device__ __forceinline__ int first_head_of_rank(const BackwardKernelParams& p) {
  return p.ranks > 1 ? cluster_rank() * p.heads_per_rank : 0;
}

/// lse of a query row; -inf if it sees none of the keys. Where it is -inf the row is dead: its
/// probabilities are made 0, and it may hold anything.
__device__ __forceinline__ float lse_of_row(const BackwardKernelParams& p, const KeyTile& tile,
                                            int64_t head_offset, int row) {
  const bool visible = row >= tile.rows.begin && row < tile.rows.end;
  return visible ? p.lse[head_offset + row] : -INFINITY;
}

/// The statistics of 64 query rows, two of each lane. Not of more: registers are few.
struct RowStats {
  static constexpr int kRows = 64;
  float lse[2];
  float delta[2];

  __device__ __forceinline__ void load(const BackwardKernelParams& p, const KeyTile& tile,
                                       int64_t head_offset, int first_row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + threadIdx.x % 32 + 32 * i;
      lse[i] = lse_of_row(p, tile, head_offset, row);
      delta[i] = lse[i] == -INFINITY ? 0.0f : p.delta[head_offset + row];
    }
  }
  template <bool kSoftcap>
  __device__ __forceinline__ void store_terms(const BackwardKernelParams& p, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x % 32 + 32 * i;
      const float of_score = kSoftcap ? 0.0f : score_term(p.lse_to_term, lse[i]);
      store_row_terms(to + row * kRowTermBytes, of_score, delta_term(delta[i]));
    }
  }
  __device__ __forceinline__ void store_minus_lse(uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x % 32 + 32 * i;
      const float x = lse[i] == -INFINITY ? -INFINITY : -kLog2E * lse[i];
      store_shared(to + 4 * lse_position(row), __float_as_uint(x));
    }
  }
};

template <GradOperand kOperand, typename Tile, bool kSoftcap>
__device__ __forceinline__ void load_grad_operand(const BackwardKernelParams& p,
                                                  const BackwardShared<Tile>& shared) {
  constexpr bool kScores = kOperand == kScoreOperand;
  const CUtensorMap& stationary = kScores ? p.k : p.v;
  const CUtensorMap& moving = kScores ? p.q : p.grad_out;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  if (is_first_lane) {
    prefetch_map(stationary);
    prefetch_map(moving);
  }
  StagePosition<BackwardShared<Tile>::stages(kOperand)> at;
  uint32_t loaded_parity = 0;
  const int first_head = first_head_of_rank(p);
  uint32_t tile_parity = 1;
  for_each_key_tile<Tile, kScores>(p, shared, [&](const KeyTile& tile) {
    if (tile.empty()) return;
    wait(shared.stationary_free(), tile_parity);
    tile_parity ^= 1;
    if (is_first_lane) {
      constexpr bool kLoadsOtherKeys = kScores && Tile::kPair;
      arrive_expecting(shared.stationary_full(kOperand),
                       Tile::kKeyBytes + (kLoadsOtherKeys ? Tile::kOtherKeyBytes : 0));
      for (int block = 0; block < Tile::kColumnBlocks; ++block) {
        load_box(shared.stationary(kOperand) + block * Tile::kKeyBlockBytes, stationary,
                 {block * kGradColumnBlock, tile.first_key, tile.kv_head, tile.batch},
                 shared.stationary_full(kOperand), L2Policy::kEvictFirst);
      }
      if constexpr (kLoadsOtherKeys) {
        // The columns of dq that this rank computes.
        for (int block = 0; block < Tile::kOtherKeyBlocks; ++block) {
          const int column = (rank_in_pair() * Tile::kOtherKeyBlocks + block) * kGradColumnBlock;
          load_box(shared.other_keys() + block * Tile::kKeyBlockBytes, stationary,
                   {column, tile.first_key ^ Tile::kBlockK, tile.kv_head, tile.batch},
                   shared.stationary_full(kOperand), L2Policy::kEvictFirst);
        }
      }
    }
    Step step(tile);
    for (int left = tile.steps(p.heads_per_rank); left > 0; --left) {
      const int head = tile.kv_head * p.heads_per_kv_head + first_head + step.head;
      const int first_row = step.query_tile * Tile::kBlockQ;
      const int64_t head_offset = tile.batch * p.lse_batch_stride + head * p.lse_head_stride;
      // 0 * NaN is NaN in the sums of dk and dv: this warp makes dead rows 0 before others read.
      bool has_dead_rows = false;
#pragma unroll
      for (int i = 0; i < Tile::kBlockQ; i += 32) {
        const int row = first_row + threadIdx.x % 32 + i;
        has_dead_rows |= lse_of_row(p, tile, head_offset, row) == -INFINITY &&
                         row < p.bounds.num_queries;  // others are zeros
      }
      has_dead_rows = __any_sync(0xffffffff, has_dead_rows);
      RowStats stats;
      // Before the wait, which hides their latency, where registers suffice.
      constexpr bool kAtOnce = Tile::kBlockQ == RowStats::kRows;
      if (kScores && kAtOnce) stats.load(p, tile, head_offset, first_row);
      wait(shared.free(kOperand, at.stage), at.parity ^ 1);
      if (kScores) {
#pragma unroll 1
        for (int i = 0; i < Tile::kBlockQ; i += RowStats::kRows) {
          if (!kAtOnce) stats.load(p, tile, head_offset, first_row + i);
          stats.store_terms<kSoftcap>(p, shared.row_terms(at.stage) + i * kRowTermBytes);
          if (kSoftcap) stats.store_minus_lse(shared.minus_lse(at.stage) + 4 * i);
        }
        fence_async_shared();
      }
      __syncwarp();
      if (is_first_lane) {
        const uint32_t full =
            has_dead_rows ? shared.loaded(kOperand) : shared.full(kOperand, at.stage);
        arrive_expecting(full, Tile::kQueryBytes);
        for (int block = 0; block < Tile::kColumnBlocks; ++block) {
          load_box(shared.moving(kOperand, at.stage) + block * Tile::kQueryBlockBytes, moving,
                   {block * kGradColumnBlock, first_row, head, tile.batch}, full,
                   L2Policy::kNormal);
        }
      }
      if (has_dead_rows) {
        wait(shared.loaded(kOperand), loaded_parity);
        loaded_parity ^= 1;
#pragma unroll 1
        for (int row = threadIdx.x % 32; row < Tile::kBlockQ; row += 32) {
          if (lse_of_row(p, tile, head_offset, first_row + row) == -INFINITY) {
            clear_row(shared.moving(kOperand, at.stage), Tile::kColumnBlocks,
                      Tile::kQueryBlockBytes, row);
          }
        }
        fence_async_shared();
        __syncwarp();
        if (is_first_lane) arrive(shared.full(kOperand, at.stage));
      }
      at.advance();
      step.template advance<Tile>(tile, p.heads_per_rank);
    }
  });
}

/// Adds to dq one of its parts, which a consumer puts into shared memory, step for step.
///   part  of the thread block's; of split roles also the consumer that computes it
template <typename Tile>
__device__ __forceinline__ void add_query_grads(const BackwardKernelParams& p,
                                                const BackwardShared<Tile>& shared, int part) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int first_head = first_head_of_rank(p);
  // Parts of the query tile: of its columns, then of its rows.
  constexpr int kParts = Tile::kHeadDim / Tile::kPartColumns;
  const int of_tile = part + (Tile::kPair ? kGradConsumers * rank_in_pair() : 0);
  Turns& turns = *reinterpret_cast<Turns*>(__cvta_shared_to_generic(shared.turns(part)));
  named_barrier_arrive(kDqFreeBarrier + part, kDqThreads);
  for_each_key_tile<Tile, false>(p, shared, [&](const KeyTile& tile) {
    if (tile.empty()) return;
    const bool in_turn = Tile::kHasTurns && p.progress != nullptr;
    if (in_turn) begin_turns<Tile>(p, tile, part, turns);
    Step step(tile);
    for (int left = tile.steps(p.heads_per_rank); left > 0; --left) {
      const int head = tile.kv_head * p.heads_per_kv_head + first_head + step.head;
      const int row = step.query_tile * Tile::kBlockQ + of_tile / kParts * kGradRows;
      const int column = of_tile % kParts * Tile::kPartColumns;
      if (in_turn && is_first_lane) wait_for_turn<Tile>(p, step, turns);
      __syncwarp();  // before a barrier of whole warps
      constexpr int kBlocks = Tile::kPartColumns / kGradFloatColumns;
      for (int first = 0; first < kBlocks; first += Tile::kDqBlocks) {
        named_barrier_wait(kDqFullBarrier + part, kDqThreads);
        if (is_first_lane) {
          for (int i = 0; i < Tile::kDqBlocks; ++i) {
            add_box(p.dq, {column + (first + i) * kGradFloatColumns, row, head, tile.batch},
                    shared.dq(part) + i * Tile::kDqBlockBytes, L2Policy::kEvictLast);
          }
          commit_stores();
          wait_for_stores_to_read();
        }
        __syncwarp();
        named_barrier_arrive(kDqFreeBarrier + part, kDqThreads);
      }
      if (in_turn && is_first_lane) end_turn<Tile>(p, tile, step, left == 1, turns);
      step.template advance<Tile>(tile, p.heads_per_rank);
    }
  });
  if (is_first_lane) wait_for_stores<0>();
}

template <typename Tile, bool kSoftcap>
__device__ __forceinline__ void copy_grads(const BackwardKernelParams& p,
                                           const BackwardShared<Tile>& shared) {
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp == 0) {
    load_grad_operand<kScoreOperand, Tile, kSoftcap>(p, shared);
  } else if (warp == 1) {
    load_grad_operand<kProbabilityOperand, Tile, kSoftcap>(p, shared);
  } else {
    add_query_grads<Tile>(p, shared, warp - 2);
  }
}

}  // namespace ringattn::cuda::sm90
