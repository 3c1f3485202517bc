// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/cuda/sm90/epilogue.cuh"
#include "attention/cuda/sm90/kernel_params.h"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/registers.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/remote_fetch.cuh"
#include "attention/cuda/sm90/tile.cuh"

// The producer warpgroup: one thread of each warp performs one kind of copy for all tiles, as far
// ahead as there are free buffers.

namespace ringattn::cuda::sm90 {

/// One thread of a cluster takes work tiles and sends them to all copying threads of the cluster.
template <typename Tile>
class WorkTileDispatcher {
 public:
  __device__ __forceinline__ WorkTileDispatcher(const KernelParams& p,
                                                const SharedMemory<Tile>& shared)
      : p_(p), shared_(shared) {}

  /// The next one, if all copying threads have read the last.
  __device__ __forceinline__ void dispatch_one() {
    if (!over_ && has_passed(shared_.work_tile_free(), round_ % 2 ^ 1)) dispatch();
  }
  /// All remaining ones.
  __device__ __forceinline__ void dispatch_all() {
    while (!over_) {
      wait(shared_.work_tile_free(), round_ % 2 ^ 1);
      dispatch();
    }
  }

 private:
  __device__ __forceinline__ void dispatch() {
    const int work_tile =
        atomicAdd(p_.remote_fetch.scratch.data + LaunchScratch::kWorkTilesTaken, 1);
    if (cluster_size() == 1) {
      shared_.set_work_tile(work_tile);
      arrive(shared_.work_tile_full());
    } else {
      for (uint32_t rank = 0; rank < cluster_size(); ++rank) {
        const uint32_t full = address_in_rank(shared_.work_tile_full(), rank);
        arrive_expecting_in_cluster(full, sizeof(work_tile));
        send_value(address_in_rank(shared_.work_tile_slot(), rank), work_tile, full);
      }
    }
    ++round_;
    over_ = work_tile >= p_.scheduler.num_tiles;
  }

  const KernelParams& p_;
  const SharedMemory<Tile>& shared_;
  uint32_t round_ = 0;
  bool over_ = false;
};

/// Prefetches into L2 the state that a tile's results are folded into, where lanes load it
/// themselves: one part with each tile of keys before the last. All thread blocks need theirs at
/// about the same time, and memory delivers it while products run.
template <typename Tile>
__device__ __forceinline__ void prefetch_state(const KernelParams& p, const QueryTile& tile,
                                               int key_tiles, int key_tile) {
  constexpr int kParts = 8, kPartBlocks = Tile::kStateBlocks / kParts;
  static_assert(Tile::kStateBlocks % kParts == 0);
  const int part = key_tile - 1;
  // With fewer tiles, products take no longer than the prefetch.
  if (!p.fold || key_tiles <= kParts || part < 0 || part >= kParts) return;
#pragma unroll 1
  for (int i = 0; i < kPartBlocks * Tile::kConsumers; ++i) {
    const int block = part * kPartBlocks + i % kPartBlocks;
    const int first_row = tile.first_row + i / kPartBlocks * kConsumerRows;
    if (first_row >= tile.rows_end) break;
    prefetch_box(p.state, {block * kStateBlock, first_row, tile.head, tile.batch});
  }
}

/// In general variants the next work tile is requested when this many key tiles, or fewer, are left
/// to load.
constexpr int kRequestAhead = 4;

/// Loads keys or values of one tile after the other. One thread block of a cluster loads them for
/// all; the others signal to it when their buffers are free.
template <Operand kOperand, typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ void load_operand(const SegmentedParams<kSegments, kVariant>& p,
                                             const SharedMemory<Tile>& shared) {
  const uint32_t ranks = cluster_size(), from_rank = kOperand == kKeys ? 0 : ranks - 1;
  const bool is_here = cluster_rank() == from_rank;
  RingPosition<kOperand == kKeys ? Tile::kKeyStages : Tile::kValueStages> ring;
  WorkTileReader work_tiles;
  KnownArrivals<kSegments> arrived;
  prefetch_map(kOperand == kKeys ? p.maps[0].k : p.maps[0].v);

  for (int work_tile = work_tiles.read(p, shared); work_tile < p.scheduler.num_tiles;
       work_tile = work_tiles.read(p, shared)) {
    if constexpr (kOperand == kValues) work_tiles.free(p, shared);
    const QueryTile tile = query_tile<Tile>(p, work_tile);
    const int kv_head = tile.head / p.heads_per_kv_head;
    if constexpr (p.kFetches) arrived.go_to(kv_head / p.fetch_order.heads_per_arrival);
    [[maybe_unused]] bool has_requested = false;  // the next tile
    uint32_t segments = 0;
    if constexpr (p.kGeneral) segments = visible_segments(p, tile);
#pragma unroll 1
    for (int segment = 0; segment < p.num_segments; ++segment) {
      int first_tile = 0, key_tiles, origin = 0;
      if constexpr (p.kGeneral) {
        if ((segments >> segment & 1) == 0) continue;
        const VisibleKeys visible = visible_keys(p.keys[segment], tile);
        origin = origin_of_tiles<Tile, kSegments>(visible);
        const KeyTiles tiles = KeyTiles::of(visible.from(origin), Tile::kBlockK);
        if (tiles.empty()) continue;  // a single segment, which need not have arrived
        first_tile = tiles.begin;
        key_tiles = tiles.end;
      } else {
        key_tiles = visible_key_tiles<Tile>(p.keys[segment], tile, tile.work_tile_end);
        if (key_tiles == 0) continue;
      }
      if constexpr (p.kFetches) {
        if (is_here) arrived.wait_for(p, segment);
      }
      const CUtensorMap& from = kOperand == kKeys ? p.maps[segment].k : p.maps[segment].v;
#pragma unroll 1
      for (int key_tile = key_tiles - 1; key_tile >= first_tile; --key_tile) {
        const uint32_t to = shared.buffer(kOperand, ring.stage);
        const uint32_t full = shared.full(kOperand, ring.stage);
        const uint32_t free_elsewhere = shared.free_elsewhere(kOperand, ring.stage);
        const auto box = [&](int block) {
          return BoxOrigin{block * kColumnBlock, origin + key_tile * Tile::kBlockK, kv_head,
                           tile.batch};
        };
        if constexpr (kOperand == kValues && Tile::kStateThroughL2) {
          if (p.kGeneral ? segments >> segment == 1 : segment == p.num_segments - 1) {
            prefetch_state<Tile>(p, tile, key_tiles - first_tile, key_tile - first_tile);
          }
        }
        if constexpr (kOperand == kKeys && p.kGeneral) {
          // A work tile of few keys would end before the answer to a request behind its loads.
          const bool near_end = segments >> segment == 1 && key_tile - first_tile < kRequestAhead;
          if (near_end && !has_requested) {
            work_tiles.free(p, shared);
            has_requested = true;
          }
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
    // The next tile is requested when this one's end is near, so that a cluster that waits for keys
    // takes no tile that another could. The answer comes while the last keys are attended.
    if constexpr (kOperand == kKeys) {
      if (!has_requested) work_tiles.free(p, shared);
    }
  }
}

/// Of general variants: the segments with keys that the tile may see, a bit for each. Leaves the
/// tiles of the first of them in the consumers' slots of `parity`. These were last read for the
/// tile before the previous one, whose queries are free.
///   origin  of these tiles
template <typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ uint32_t announce_keys(const SegmentedParams<kSegments, kVariant>& p,
                                                  const SharedMemory<Tile>& shared,
                                                  const QueryTile& tile, uint32_t parity,
                                                  int& origin) {
  const uint32_t segments = visible_segments(p, tile);
  if (segments == 0) return 0;
  const KeyBounds& keys = p.keys[first_segment<kSegments>(segments)];
  const VisibleKeys of_tile = visible_keys(keys, tile);
  origin = origin_of_tiles<Tile, kSegments>(of_tile);
  const KeyRange some = of_tile.from(origin).some;
  // Unrolled, so that the table is read for all consumers at one time.
  VisibleKeys visible[Tile::kConsumers];
#pragma unroll
  for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
    visible[consumer] = consumer_keys(keys, tile, consumer);
  }
#pragma unroll
  for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
    shared.set_first_tiles(consumer, parity,
                           consumer_tiles<Tile>(some, visible[consumer].from(origin)));
  }
  return some.begin < some.end ? segments : 0;
}

/// Loads queries of one tile after the other, and the state that their results are folded into.
template <typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ void load_queries(const SegmentedParams<kSegments, kVariant>& p,
                                             const SharedMemory<Tile>& shared) {
  uint32_t parity = 0;  // of the next tile's queries
  uint32_t states = 0;  // loaded so far
  WorkTileReader work_tiles;
  prefetch_map(p.q);

  /// Each consumer's queries as soon as it has freed the previous ones; none where no keys are
  /// visible. Slots of this parity were last read for the tile before the previous one: its queries
  /// are free.
  ///   segment, origin  the first one with keys; of general variants those of announce_keys()
  const auto announce = [&](const QueryTile& tile, int segment, int origin) {
    const bool sees_keys = p.kGeneral ? segment != 0 : segment < p.num_segments;
    if constexpr (p.kGeneral) {
      const bool has_sink = tile.exists() && p.sinks != nullptr;
      const float sink = has_sink ? __ldcg(p.sinks + tile.head) : 0.0f;
#pragma unroll 1
      for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
        shared.set_general_tile(consumer, parity, tile, states % 2, segment, sink, origin);
      }
    }
#pragma unroll 1
    for (int i = 0; i < Tile::kConsumers; ++i) {
      // Where rows see ranges, the last ones see the highest keys, which come first.
      const int consumer = p.kGeneral ? Tile::kConsumers - 1 - i : i;
      const int first_row = tile.first_row + consumer * kConsumerRows;
      const uint32_t full = shared.queries_full(consumer);
      if constexpr (!p.kGeneral) {
        VisibleTiles visible = {};
        if (sees_keys) visible = visible_tiles<Tile>(p.keys[segment], tile, first_row);
        shared.set_tile(consumer, parity, tile, states % 2, segment, visible);
      }
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

  for (int work_tile = work_tiles.read(p, shared); work_tile < p.scheduler.num_tiles;
       work_tile = work_tiles.read(p, shared)) {
    work_tiles.free(p, shared);
    const QueryTile tile = query_tile<Tile>(p, work_tile);
    int segment, origin = 0;
    if constexpr (p.kGeneral) {
      segment = announce_keys(p, shared, tile, parity, origin);
    } else {
      segment = visible_segment<Tile>(p, tile, 0);
    }
    announce(tile, segment, origin);
    if (!Tile::kStateThroughShared || segment == p.none_visible() || !p.fold ||
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
  announce({-1, 0, 0, 0, 0, 0}, p.none_visible(), 0);
}

/// The producer warpgroup.
template <typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ void copy(const SegmentedParams<kSegments, kVariant>& p,
                                     const SharedMemory<Tile>& shared) {
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const bool elected = elect_one_lane();
  constexpr uint32_t kFinishing = 3;
  // The launch may run beside the staging kernel. That kernel has waited for the end of its
  // predecessors, so what they wrote is in L2, and it is read through L2 alone: by the copy engine,
  // after this fence, and by loads of signals. No state is folded in there.
  if constexpr (p.kFetches) fence_async_global();
  if (warp == 0) {
    if (elected) load_queries<Tile>(p, shared);
    return;
  }
  if (warp == 1) {
    if (elected) load_operand<kKeys, Tile>(p, shared);
  } else if (warp == 2) {
    if (elected) load_operand<kValues, Tile>(p, shared);
  } else if (elected && p.remote_fetch.scratch.data != nullptr) {
    const bool dispatches = cluster_rank() == 0;
    WorkTileDispatcher<Tile> dispatcher(p, shared);
    if constexpr (p.kFetches) {
      if (p.remote_fetch.failed != nullptr) {
        fetch_chunks(p, shared, [&] {
          if (dispatches) dispatcher.dispatch_one();
        });
      }
    }
    if (dispatches) dispatcher.dispatch_all();
  }
  __syncwarp();
  finish_launch(p, kFinishing);
}

}  // namespace ringattn::cuda::sm90
