// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/backward/kernel_params.h"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/backward/turn_order.h"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "peer_sync/memory_order.cuh"

// The turns of work tiles to add to dq, in deterministic calls. Of each tile, ranks of a cluster
// and parts of dq have turns of their own.

namespace ringattn::cuda::sm90 {

/// Of a work tile, in shared memory: the warp that adds has few registers. Tiles to wait for are
/// elements of BackwardKernelParams::progress here, twice, plus 1 if they descend.
struct alignas(16) Turns {
  AwaitedTiles awaited;
  int own;            // element of progress
  int seen_of, seen;  // how far a tile to wait for has come, at least
};
static_assert(sizeof(Turns) == kTurnBytes);

/// By all lanes of a warp, which has no turns under way.
template <typename Tile>
__device__ __forceinline__ void begin_turns(const BackwardKernelParams& p, const KeyTile& tile,
                                            int part, Turns& shared_turns) {
  const int ranks = Tile::kPair ? 2 : p.ranks;
  const int rank = Tile::kPair ? rank_in_pair() : p.ranks > 1 ? cluster_rank() : 0;
  const int plane = tile.batch * p.num_kv_heads + tile.kv_head;
  const int index = tile.first_key / Tile::kClusterKeys;
  AwaitedTiles awaited;
  if constexpr (Tile::kByTicket) {
    awaited = awaited_by_ticket(index, Tile::kBlockQ, [&](int other) {
      return visible_queries<Tile::kBlockK>(p.bounds, other * Tile::kBlockK).some;
    });
  } else {
    const int in_slice = plane % p.planes_per_slice;
    const int planes = p.batch * p.num_kv_heads - (plane - in_slice);
    const PlaneRounds rounds = {static_cast<int>(gridDim.x) / ranks,
                                min(planes, p.planes_per_slice), in_slice};
    awaited = awaited_in_rounds(rounds, p.bounds, index, p.num_key_tiles, Tile::kBlockQ,
                                Tile::kClusterKeys);
  }
  const int pitch = ranks * kGradConsumers;  // from tile to tile
  const int first = plane * p.num_key_tiles * pitch + rank * kGradConsumers + part;
  for (AwaitedTile* x : {&awaited.from_limit, &awaited.below_limit}) {
    if (*x != kNoTile) *x = 2 * (first + *x / 2 * pitch) + *x % 2;
  }
  if (threadIdx.x % 32 == 0) shared_turns = {awaited, first + index * pitch, kNoTile, 0};
}

template <typename Tile>
__device__ __forceinline__ int progress_at(const BackwardKernelParams& p, const Step& step,
                                           bool descending) {
  return progress_at(step.query_tile, step.head, p.heads_per_rank,
                     (p.bounds.num_queries - 1) / Tile::kBlockQ, descending);
}

/// By one lane, before a step adds to dq.
template <typename Tile>
__device__ __forceinline__ void wait_for_turn(const BackwardKernelParams& p, const Step& step,
                                              Turns& turns) {
  const AwaitedTile awaited =
      step.query_tile >= turns.awaited.limit ? turns.awaited.from_limit : turns.awaited.below_limit;
  if (awaited == kNoTile) return;
  const int wanted = progress_at<Tile>(p, step, awaited % 2 != 0);
  if (awaited == turns.seen_of && wanted <= turns.seen) return;
  int seen;
  do {
    seen = load_acquire(p.progress + awaited / 2);
  } while (seen < wanted);
  fence_async_global();
  turns.seen_of = awaited;
  turns.seen = seen;
}

/// By the same lane, when it has issued the adds of the step.
template <typename Tile>
__device__ __forceinline__ void end_turn(const BackwardKernelParams& p, const KeyTile& tile,
                                         const Step& step, bool is_last, const Turns& turns) {
  wait_for_stores<0>();
  store_release(p.progress + turns.own,
                is_last ? INT32_MAX : progress_at<Tile>(p, step, tile.descending));
}

}  // namespace ringattn::cuda::sm90
