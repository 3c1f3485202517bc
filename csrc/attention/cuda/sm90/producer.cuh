// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/cuda/sm90/epilogue.cuh"
#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/registers.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/remote_fetch.cuh"
#include "attention/cuda/sm90/tile.cuh"

// The copying warpgroup: a thread of each warp does one thing for all the tiles, as far ahead as
// there are free buffers.

namespace ringattn::cuda::sm90 {

/// One thread of a cluster asks for turns and tells all its copying threads.
template <typename Tile>
class TurnsHandedOut {
 public:
  __device__ __forceinline__ TurnsHandedOut(const KernelParams& p, const SharedMemory<Tile>& shared)
      : p_(p), shared_(shared) {}

  /// If the next one is asked for.
  __device__ __forceinline__ void hand_out_one() {
    if (!over_ && has_passed(shared_.turn_free(), round_ % 2 ^ 1)) hand_out();
  }
  /// All that are left.
  __device__ __forceinline__ void hand_out_all() {
    while (!over_) {
      wait(shared_.turn_free(), round_ % 2 ^ 1);
      hand_out();
    }
  }

 private:
  __device__ __forceinline__ void hand_out() {
    const int turn = atomicAdd(p_.bringing.words.data + LaunchWords::kTurnsTaken, 1);
    if (cluster_size() == 1) {
      shared_.set_turn(turn);
      arrive(shared_.turn_full());
    } else {
      for (uint32_t rank = 0; rank < cluster_size(); ++rank) {
        const uint32_t full = address_in_rank(shared_.turn_full(), rank);
        arrive_expecting_in_cluster(full, sizeof(turn));
        send_word(address_in_rank(shared_.turn_word(), rank), turn, full);
      }
    }
    ++round_;
    over_ = turn >= p_.order.turns;
  }

  const KernelParams& p_;
  const SharedMemory<Tile>& shared_;
  uint32_t round_ = 0;
  bool over_ = false;
};

/// Fetches into L2 the state that a tile's results are folded into, where lanes load it themselves:
/// a part with each of the tiles of keys before the last one. All thread blocks want theirs at
/// about the same time, and it comes from memory under products.
template <typename Tile>
__device__ __forceinline__ void fetch_state_ahead(const KernelParams& p, const QueryTile& tile,
                                                  int key_tiles, int key_tile) {
  constexpr int kParts = 8, kPartBlocks = Tile::kStateBlocks / kParts;
  static_assert(Tile::kStateBlocks % kParts == 0);
  const int part = key_tile - 1;
  // Of fewer tiles, products take no longer than the fetching.
  if (!p.fold || key_tiles <= kParts || part < 0 || part >= kParts) return;
#pragma unroll 1
  for (int i = 0; i < kPartBlocks * Tile::kConsumers; ++i) {
    const int block = part * kPartBlocks + i % kPartBlocks;
    const int first_row = tile.first_row + i / kPartBlocks * kConsumerRows;
    if (first_row >= tile.rows_end) break;
    prefetch_box(p.state, {block * kStateBlock, first_row, tile.head, tile.batch});
  }
}

/// Keys or values of one tile after the other. One thread block of a cluster brings them for all;
/// the others tell it when they can take them.
template <Operand kOperand, typename Tile, int kSegments>
__device__ __forceinline__ void bring(const SegmentedParams<kSegments>& p,
                                      const SharedMemory<Tile>& shared) {
  const uint32_t ranks = cluster_size(), from_rank = kOperand == kKeys ? 0 : ranks - 1;
  const bool is_here = cluster_rank() == from_rank;
  RingPosition<kOperand == kKeys ? Tile::kKeyStages : Tile::kValueStages> ring;
  TurnsTaken turns;
  SeenArrivals<kSegments> arrived;
  prefetch_map(kOperand == kKeys ? p.maps[0].k : p.maps[0].v);

  for (int turn = turns.read(p, shared); turn < p.order.turns; turn = turns.read(p, shared)) {
    if constexpr (kOperand == kValues) turns.free(p, shared);
    const QueryTile tile = query_tile<Tile>(p, turn);
    const int kv_head = tile.head / p.heads_per_kv_head;
    if constexpr (p.kBringing) arrived.go_to(kv_head / p.bring.heads_per_arrival);
#pragma unroll 1
    for (int segment = 0; segment < p.num_segments; ++segment) {
      const int key_tiles = tiles_seen<Tile>(p.keys[segment], tile, tile.turn_end);
      if (key_tiles == 0) continue;
      if constexpr (p.kBringing) {
        if (is_here) arrived.wait_for(p, segment);
      }
      const CUtensorMap& from = kOperand == kKeys ? p.maps[segment].k : p.maps[segment].v;
#pragma unroll 1
      for (int key_tile = key_tiles - 1; key_tile >= 0; --key_tile) {
        const uint32_t to = shared.buffer(kOperand, ring.stage);
        const uint32_t full = shared.full(kOperand, ring.stage);
        const uint32_t free_elsewhere = shared.free_elsewhere(kOperand, ring.stage);
        const auto box = [&](int block) {
          return BoxOrigin{block * kColumnBlock, key_tile * Tile::kBlockK, kv_head, tile.batch};
        };
        if constexpr (kOperand == kValues && Tile::kStateThroughL2) {
          if (segment == p.num_segments - 1) fetch_state_ahead<Tile>(p, tile, key_tiles, key_tile);
        }
        wait(shared.free(kOperand, ring.stage), ring.parity ^ 1);
        arrive_expecting(full, Tile::kKeyBytes);
        if (!is_here) {
          arrive_in_cluster(address_in_rank(free_elsewhere, from_rank));
        } else if (ranks == 1) {
#pragma unroll
          for (int block = 0; block < Tile::kColumnBlocks; ++block) {
            load_box(to + block * Tile::kKeyBlockBytes, from, box(block), full,
                     L2Policy::kEvictLast);
          }
        } else {
          wait(free_elsewhere, ring.parity);
#pragma unroll
          for (int block = 0; block < Tile::kColumnBlocks; ++block) {
            load_box_in_ranks(to + block * Tile::kKeyBlockBytes, from, box(block), full,
                              (1 << ranks) - 1, L2Policy::kEvictLast);
          }
        }
        ring.advance();
      }
    }
    // The next tile is asked for when this one's end is near: who waits for an arrival keeps none
    // from the others. The answer comes while the last keys are attended to.
    if constexpr (kOperand == kKeys) turns.free(p, shared);
  }
}

/// Queries of one tile after the other, and the state that its results are folded into.
template <typename Tile, int kSegments>
__device__ __forceinline__ void bring_queries(const SegmentedParams<kSegments>& p,
                                              const SharedMemory<Tile>& shared) {
  uint32_t parity = 0;  // of the next tile's queries
  uint32_t states = 0;  // that were loaded
  TurnsTaken turns;
  prefetch_map(p.q);

  /// Each consumer's queries as soon as it has done with those before. None where none are
  /// attended.
  const auto announce = [&](const QueryTile& tile, int segment) {
    const bool sees_keys = segment < p.num_segments;
#pragma unroll 1
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
      const int first_row = tile.first_row + consumer * kConsumerRows;
      const uint32_t full = shared.queries_full(consumer);
      SeenKeys seen = {};
      if (sees_keys) seen = seen_keys<Tile>(p.keys[segment], tile, first_row);
      // Its place was last read for the tile before the last one, whose queries are free.
      shared.set_tile(consumer, parity, tile, states % 2, segment, seen);
      wait(shared.queries_free(consumer), parity ^ 1);
      arrive_expecting(full, sees_keys ? Tile::kQueryBytes / Tile::kConsumers : 0);
      if (!sees_keys) continue;
#pragma unroll
      for (int block = 0; block < Tile::kColumnBlocks; ++block) {
        load_box(shared.queries(consumer) + block * Tile::kQueryBlockBytes, p.q,
                 {block * kColumnBlock, first_row, tile.head, tile.batch}, full,
                 L2Policy::kEvictFirst);
      }
    }
    parity ^= 1;
  };

  for (int turn = turns.read(p, shared); turn < p.order.turns; turn = turns.read(p, shared)) {
    turns.free(p, shared);
    const QueryTile tile = query_tile<Tile>(p, turn);
    const int segment = seen_segment<Tile>(p, tile, 0);
    announce(tile, segment);
    if (!Tile::kStateThroughShared || segment == p.num_segments || !p.fold ||
        !goes_through_shared<Tile>(p, tile)) {
      continue;
    }
    wait(shared.state_free(), states % 2 ^ 1);
    ++states;
    arrive_expecting(shared.state_full(), Tile::kStateBytes);
#pragma unroll 1
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer)
#pragma unroll 1
      for (int block = 0; block < Tile::kStateBlocks; ++block) {
        load_box(
            shared.results(consumer) + block * Tile::kResultBlockBytes, p.state,
            {block * kStateBlock, tile.first_row + consumer * kConsumerRows, tile.head, tile.batch},
            shared.state_full(), L2Policy::kEvictFirst);
      }
  }
  announce({-1, 0, 0, 0, 0, 0}, p.num_segments);
}

/// All of it, by the warps of one warpgroup.
template <typename Tile, int kSegments>
__device__ __forceinline__ void copy(const SegmentedParams<kSegments>& p,
                                     const SharedMemory<Tile>& shared) {
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const bool elected = elect_one_lane();
  constexpr uint32_t kFinishing = 3;
  // The launch may have begun beside the staging kernel. What kernels before that one wrote is in
  // L2, since it has waited for their end, and is read through L2 alone: by the engine, from here
  // on, and by loads of words. No state is folded in there.
  if constexpr (p.kBringing) fence_async_global();
  if (warp == 0) {
    if (elected) bring_queries<Tile>(p, shared);
    return;
  }
  if (warp == 1) {
    if (elected) bring<kKeys, Tile>(p, shared);
  } else if (warp == 2) {
    if (elected) bring<kValues, Tile>(p, shared);
  } else if (elected && p.bringing.words.data != nullptr) {
    const bool hands_out = cluster_rank() == 0;
    TurnsHandedOut<Tile> turns(p, shared);
    if constexpr (p.kBringing) {
      if (p.bringing.failed != nullptr) {
        bring_pieces(p, shared, [&] {
          if (hands_out) turns.hand_out_one();
        });
      }
    }
    if (hands_out) turns.hand_out_all();
  }
  __syncwarp();
  finish(p, kFinishing);
}

}  // namespace ringattn::cuda::sm90
