// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/sm90/kernel_params.h"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/shared_words.cuh"
#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_selection.h"
#include "attention/cuda/sm90/visible_tiles.cuh"

// The shapes of tiles, the map of shared memory, and the work tiles that a thread block takes.

namespace ringattn::cuda::sm90 {

constexpr int kWarpgroupSize = 128;
constexpr int kColumnBlock = 64;        // adjacent columns: 128 bytes of a 16-bit type
constexpr int kColumnBlockPitch = 128;  // bytes from row to row
constexpr int kStateBlock = 32;         // the same in float32

// Named barriers: the ping-pong of the consumers, then one for the threads of each consumer.
constexpr int kMaxConsumers = 4;
constexpr int kPingPongBarrier = 1;
constexpr int kWarpgroupBarrier = kPingPongBarrier + kMaxConsumers;

/// One warpgroup copies (the producer); kConsumers warpgroups attend 64 query rows each. setmaxnreg
/// moves registers from the producer to the consumers.
///   kKeyStages, kValueStages  tiles of keys and of values in shared memory
///   kWithState                results may be a state, in float32
///   kInPairs                  two thread blocks share keys and values, where they can
///   kMaxFetchBufferBytes      bytes of a fetch buffer (kernel_params.h: sizes), at most
template <int kHeadDim_, int kConsumers_, int kBlockK_, int kKeyStages_, int kValueStages_,
          bool kWithState, bool kInPairs_, int kMaxFetchBufferBytes, int kCopyRegisters_,
          int kConsumerRegisters_>
struct TileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static_assert(kConsumers <= kMaxConsumers);
  static constexpr int kBlockQ = kConsumerRows * kConsumers;
  static constexpr int kBlockK = kBlockK_;
  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr bool kInPairs = kInPairs_;
  static constexpr int kCopyRegisters = kCopyRegisters_;
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kCopyRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * kFirstRegisters);

  static constexpr int kColumnBlocks = kHeadDim / kColumnBlock;
  static constexpr int kQueryBlockBytes = kBlockQ * kColumnBlockPitch;  // of one column block
  static constexpr int kKeyBlockBytes = kBlockK * kColumnBlockPitch;
  static constexpr int kQueryBytes = kColumnBlocks * kQueryBlockBytes;
  static constexpr int kKeyBytes = kColumnBlocks * kKeyBlockBytes;
  static_assert(kKeyBlockBytes % 1024 == 0);

  static constexpr int kAlignment = 1024;  // of the 128-byte swizzle
  static constexpr int kMaxStages = 3;
  static_assert(kKeyStages <= kMaxStages && kValueStages <= kMaxStages);
  /// Chunks from peers pass through two fetch buffers.
  static constexpr int kFetchBuffers = 2;
  // Barriers (SharedMemory): four with names of their own, then the first ones of the queries, of
  // the buffers and of the fetch buffers.
  static constexpr int kQueryBarriers = 4;
  static constexpr int kBufferBarriers = kQueryBarriers + 2 * kConsumers;
  static constexpr int kFetchBufferBarriers = kBufferBarriers + 6 * kMaxStages;
  static constexpr int kBarriers = kFetchBufferBarriers + kFetchBuffers;
  // In front of the barriers: slots for two query tiles of each consumer and for one work tile.
  // Behind them: the state of the fetch pipeline.
  static constexpr int kTileBytes = 32, kWorkTileBytes = 8, kFetchStateBytes = 48;
  static constexpr int kSlotBytes = 2 * kConsumers * kTileBytes + kWorkTileBytes;
  static constexpr int kBarrierBytes =
      (kSlotBytes + 8 * kBarriers + kFetchStateBytes + 15) / 16 * 16;
  static constexpr int kLoadedBytes =
      kQueryBytes + (kKeyStages + kValueStages) * kKeyBytes + kBarrierBytes;
  static constexpr int kMaxSharedBytes = 232448;
  static constexpr int kStateBlocks = kHeadDim / kStateBlock;
  static constexpr int kStateBytes = kBlockQ * kHeadDim * 4;  // of float32
  static constexpr int kOutBytes = kWithState ? kStateBytes : kQueryBytes;
  /// Where there is room, results leave through memory of their own, those of a state in float32,
  /// into which the earlier state is loaded while the tile is attended; the next queries are loaded
  /// meanwhile. Otherwise results leave through the memory of the queries, in 16 bits.
  static constexpr bool kSeparateOut = kLoadedBytes + kOutBytes <= kMaxSharedBytes;
  static constexpr bool kStateThroughShared = kSeparateOut && kWithState;
  static constexpr bool kStateThroughL2 = !kSeparateOut && kWithState;
  static constexpr int kOwnBytes = kLoadedBytes + (kSeparateOut ? kOutBytes : 0);
  /// Fetch buffers take what is left. With 1,280 bytes each on 132 SMs, 340 KB are in flight: what
  /// NVLink needs while memory is otherwise idle.
  static constexpr int kFetchBufferBytes =
      std::min(kMaxFetchBufferBytes, (kMaxSharedBytes - kOwnBytes) / kFetchBuffers / 128 * 128);
  static constexpr int kSharedBytes = kOwnBytes + kFetchBuffers * kFetchBufferBytes;
  static_assert(kFetchBufferBytes >= 512);
  /// Behind all else, of general variants alone: the ConsumerTiles of two tiles of each consumer.
  static constexpr int kConsumerTilesBytes = 32;
  static constexpr int kGeneralSharedBytes = kSharedBytes + 2 * kConsumers * kConsumerTilesBytes;
  static constexpr int kResultBlockBytes =
      kConsumerRows * kColumnBlockPitch;  // of one consumer's rows
  static constexpr int kOutBlockBytes = kSeparateOut ? kResultBlockBytes : kQueryBlockBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// By the largest head dimension. Up to 128 the host chooses between two sizes (tile_selection.h);
// each has shapes for calls with a state, for calls without, and for calls without a state that are
// fetch-bound, for which larger fetch buffers pay.
// clang-format off
using Tile64 = TileShape<64, 4, 64, 3, 3, true, false, 4096, 32, 112>;
using Tile128 = TileShape<128, 3, 80, 3, 3, false, true, 1280, 32, 160>;
using Tile128FetchBound = TileShape<128, 3, 80, 3, 3, false, true, 4096, 32, 160>;
using Tile128WithState = TileShape<128, 3, 80, 2, 2, true, true, 4096, 32, 160>;
using SmallTile128 = TileShape<128, 2, 128, 3, 2, false, true, 4096, 40, 232>;
using SmallTile128FetchBound = TileShape<128, 2, 128, 2, 2, false, true, 4096, 40, 232>;
using SmallTile128WithState = TileShape<128, 2, 128, 2, 2, true, true, 4096, 40, 232>;
using Tile256 = TileShape<256, 2, 80, 2, 2, true, true, 4096, 40, 232>;
// Of the general variants, whose fetch buffers leave room for ConsumerTiles. At D 128 a softcap
// needs more registers than three consumers have.
using GeneralTile64 = TileShape<64, 3, 80, 3, 3, true, false, 4096, 40, 152>;
using GeneralTile128 = TileShape<128, 3, 80, 2, 2, true, false, 1152, 40, 152>;
using GeneralSoftcapTile128 = TileShape<128, 2, 128, 2, 2, true, true, 1152, 40, 232>;
using GeneralTile256 = TileShape<256, 2, 80, 2, 2, true, true, 1152, 40, 232>;
// clang-format on
static_assert(Tile128::kBlockQ == kLargeTile.rows && Tile128::kBlockK == kLargeTile.keys);
static_assert(SmallTile128::kBlockQ == kSmallTile.rows && SmallTile128::kBlockK == kSmallTile.keys);
static_assert(Tile64::kBlockQ == kTile64.rows && Tile64::kBlockK == kTile64.keys);
static_assert(Tile256::kBlockQ == kTile256.rows && Tile256::kBlockK == kTile256.keys);

/// What is loaded in tiles of kBlockK rows.
enum Operand { kKeys, kValues };

/// Addresses in shared memory.
template <typename Tile>
struct SharedMemory {
  uint32_t base;

  /// `dynamic` must be aligned to Tile::kAlignment.
  __device__ __forceinline__ explicit SharedMemory(const void* dynamic)
      : base(shared_address(dynamic)) {}

  /// A consumer's 64 rows, in column blocks that are kQueryBlockBytes apart.
  __device__ __forceinline__ uint32_t queries(int consumer) const {
    return base + consumer * kConsumerRows * kColumnBlockPitch;
  }
  __device__ __forceinline__ uint32_t buffer(Operand operand, uint32_t stage) const {
    const uint32_t first = operand == kKeys ? 0 : Tile::kKeyStages;
    return base + Tile::kQueryBytes + (first + stage) * Tile::kKeyBytes;
  }
  /// Results of a consumer's 64 rows: column blocks in 16 bits, kOutBlockBytes apart, or in
  /// float32, kResultBlockBytes apart.
  __device__ __forceinline__ uint32_t results(int consumer) const {
    return Tile::kSeparateOut ? buffer(kValues, Tile::kValueStages) +
                                    consumer * (Tile::kOutBytes / Tile::kConsumers)
                              : queries(consumer);
  }

  /// Each buffer has two barriers: full (the copy engine has written it) and free (every consumer
  /// has read it; for queries, their consumer).
  __device__ __forceinline__ uint32_t queries_full(int consumer) const {
    return barrier(Tile::kQueryBarriers + 2 * consumer);
  }
  __device__ __forceinline__ uint32_t queries_free(int consumer) const {
    return barrier(Tile::kQueryBarriers + 2 * consumer + 1);
  }
  __device__ __forceinline__ uint32_t state_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t state_free() const { return barrier(1); }
  __device__ __forceinline__ uint32_t full(Operand operand, uint32_t stage) const {
    return barrier(Tile::kBufferBarriers + operand * Tile::kMaxStages + stage);
  }
  __device__ __forceinline__ uint32_t free(Operand operand, uint32_t stage) const {
    return barrier(Tile::kBufferBarriers + (2 + operand) * Tile::kMaxStages + stage);
  }
  /// In the thread block that loads keys or values for its cluster: free in the other thread
  /// blocks.
  __device__ __forceinline__ uint32_t free_elsewhere(Operand operand, uint32_t stage) const {
    return barrier(Tile::kBufferBarriers + (4 + operand) * Tile::kMaxStages + stage);
  }
  /// The slot of the dispatched work tile.
  __device__ __forceinline__ uint32_t work_tile_full() const { return barrier(2); }
  __device__ __forceinline__ uint32_t work_tile_free() const { return barrier(3); }

  /// Fetch buffer i.
  __device__ __forceinline__ uint32_t fetch_buffer(uint32_t i) const {
    return slots() - (i + 1) * Tile::kFetchBufferBytes;
  }
  __device__ __forceinline__ uint32_t fetch_buffer_full(uint32_t i) const {
    return barrier(Tile::kFetchBufferBarriers + i);
  }
  /// Memory of the FetchPipeline: kFetchStateBytes.
  __device__ __forceinline__ uint32_t fetch_state() const { return barrier(Tile::kBarriers); }

  /// The query tile of a consumer's queries, and the visible tiles of `segment`, the first that is
  /// visible. Written before queries_full, read after it, until the queries are free. The parity of
  /// queries_full selects the slot: the next tile may be written meanwhile.
  __device__ __forceinline__ void set_tile(int consumer, uint32_t parity, const QueryTile& tile,
                                           uint32_t state_parity, int segment,
                                           const VisibleTiles& visible) const {
    set_rows(consumer, parity, tile, state_parity);
    store_words(keys_slot(consumer, parity),
                {segment, visible.tiles, visible.own, visible.unmasked});
  }
  __device__ __forceinline__ QueryTile tile(int consumer, uint32_t parity) const {
    const int4 x = load_words(tile_slot(consumer, parity));
    const uint32_t head = x.w;
    QueryTile tile;
    tile.first_row = x.x;
    tile.work_tile_end = x.y;
    tile.batch = x.z;
    tile.head = head / 2;
    tile.state_parity = head % 2;
    tile.rows_end = min(tile.first_row + Tile::kBlockQ, tile.work_tile_end);
    return tile;
  }
  __device__ __forceinline__ VisibleTiles first_visible(int consumer, uint32_t parity,
                                                        int& segment) const {
    const int4 x = load_words(keys_slot(consumer, parity));
    segment = x.x;
    return {x.y, x.z, x.w};
  }

  /// Of general variants: the segments that are seen, the sink, and the first one's
  /// origin_of_tiles(); in first_tiles what the rows see of that. Written and read as above; so
  /// consumers do not wait for memory when a tile begins or ends.
  __device__ __forceinline__ void set_general_tile(int consumer, uint32_t parity,
                                                   const QueryTile& tile, uint32_t state_parity,
                                                   int segments, float sink, int origin) const {
    set_rows(consumer, parity, tile, state_parity);
    store_words(keys_slot(consumer, parity), {segments, __float_as_int(sink), origin, 0});
  }
  __device__ __forceinline__ void set_first_tiles(int consumer, uint32_t parity,
                                                  const ConsumerTiles& tiles) const {
    const uint32_t to = consumer_tiles_slot(consumer, parity);
    const KeyTiles& own = tiles.own;
    store_words(to, {own.begin, own.end, own.unmasked_begin, own.unmasked_end});
    // Flags are the lowest bits of numbers that are not negative.
    store_words(to + 16, {2 * tiles.above + tiles.ends_early, 2 * tiles.below + tiles.begins_late,
                          2 * tiles.near_begin + tiles.disjoint, tiles.near_end});
  }
  __device__ __forceinline__ uint32_t segments(int consumer, uint32_t parity) const {
    return load_words(keys_slot(consumer, parity)).x;
  }
  __device__ __forceinline__ float sink(int consumer, uint32_t parity) const {
    return __int_as_float(load_words(keys_slot(consumer, parity)).y);
  }
  __device__ __forceinline__ int origin(int consumer, uint32_t parity) const {
    return load_words(keys_slot(consumer, parity)).z;
  }
  __device__ __forceinline__ ConsumerTiles first_tiles(int consumer, uint32_t parity) const {
    const uint32_t from = consumer_tiles_slot(consumer, parity);
    const int4 own = load_words(from), rest = load_words(from + 16);
    return {rest.x / 2,      {own.x, own.y, own.z, own.w},
            rest.y / 2,      rest.z / 2,
            rest.w,          rest.z % 2 != 0,
            rest.x % 2 != 0, rest.y % 2 != 0};
  }

  /// Written before work_tile_full, read after it.
  __device__ __forceinline__ uint32_t work_tile_slot() const {
    return slots() + Tile::kSlotBytes - Tile::kWorkTileBytes;
  }
  __device__ __forceinline__ void set_work_tile(int work_tile) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(work_tile_slot()), "r"(work_tile) : "memory");
  }
  __device__ __forceinline__ int work_tile() const {
    int work_tile;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(work_tile) : "r"(work_tile_slot()) : "memory");
    return work_tile;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
      init_barrier(queries_full(consumer), 1);
      // Each warp arrives once it has read the tile.
      init_barrier(queries_free(consumer), kWarpgroupSize / 32);
    }
    init_barrier(state_full(), 1);
    init_barrier(state_free(), Tile::kConsumers);
    for (const Operand operand : {kKeys, kValues}) {
      const int stages = operand == kKeys ? Tile::kKeyStages : Tile::kValueStages;
      for (int stage = 0; stage < stages; ++stage) {
        init_barrier(full(operand, stage), 1);
        // Keys are freed by each warp, values by one thread of each warpgroup.
        const int warps = operand == kKeys ? kWarpgroupSize / 32 : 1;
        init_barrier(free(operand, stage), warps * Tile::kConsumers);
        if (cluster_size() > 1) init_barrier(free_elsewhere(operand, stage), cluster_size() - 1);
      }
    }
    for (int i = 0; i < Tile::kFetchBuffers; ++i) init_barrier(fetch_buffer_full(i), 1);
    init_barrier(work_tile_full(), 1);
    init_barrier(work_tile_free(), 3 * cluster_size());  // threads that load queries, keys, values
    publish_barriers();
  }

 private:
  static_assert(Tile::kSharedBytes % 16 == 0 && Tile::kBarrierBytes % 16 == 0);

  __device__ __forceinline__ uint32_t tile_slot(int consumer, uint32_t parity) const {
    return slots() + (2 * consumer + parity) * Tile::kTileBytes;
  }
  /// Its other half says which keys the rows see; of general variants which segments, and the sink.
  __device__ __forceinline__ uint32_t keys_slot(int consumer, uint32_t parity) const {
    return tile_slot(consumer, parity) + 16;
  }
  __device__ __forceinline__ void set_rows(int consumer, uint32_t parity, const QueryTile& tile,
                                           uint32_t state_parity) const {
    store_words(tile_slot(consumer, parity), {tile.first_row, tile.work_tile_end, tile.batch,
                                              static_cast<int>(2 * tile.head + state_parity)});
  }
  __device__ __forceinline__ uint32_t consumer_tiles_slot(int consumer, uint32_t parity) const {
    return base + Tile::kSharedBytes + (2 * consumer + parity) * Tile::kConsumerTilesBytes;
  }
  __device__ __forceinline__ uint32_t barrier(uint32_t i) const {
    return slots() + Tile::kSlotBytes + 8 * i;
  }
  __device__ __forceinline__ uint32_t slots() const {
    return base + Tile::kSharedBytes - Tile::kBarrierBytes;
  }
};

/// A position in a ring of buffers: the stage, and the parity of its current phase.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if constexpr (kStages == 2) {
      parity ^= stage;
      stage ^= 1;
    } else {
      stage = stage == kStages - 1 ? 0 : stage + 1;
      parity ^= stage == 0;
    }
  }
};

/// This thread block's part of work tile number `work_tile`.
template <typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ QueryTile query_tile(const SegmentedParams<kSegments, kVariant>& p,
                                                int work_tile) {
  const TileScheduler& scheduler = p.scheduler;
  if constexpr (p.kReorders) work_tile = p.reordered(work_tile);
  const int rank = Tile::kInPairs ? cluster_rank() : 0;
  const TileScheduler::Assignment assigned =
      scheduler.assignment(work_tile, rank, Tile::kBlockQ, p.num_queries);
  // Batch entries of a KV head are adjacent, in the order of their arrival.
  const int group = assigned.head / p.heads_per_kv_head;
  const int kv_head = group / p.batch;

  QueryTile at;
  at.first_row = assigned.first_row;
  at.rows_end = min(assigned.first_row + Tile::kBlockQ, assigned.work_tile_end);
  at.work_tile_end = assigned.work_tile_end;
  at.batch = group - kv_head * p.batch;
  at.head = kv_head * p.heads_per_kv_head + assigned.head - group * p.heads_per_kv_head;
  return at;
}

/// The work tiles of this cluster: without scratch, one in each round of as many tiles as there are
/// clusters, in alternating direction (static); with scratch, the next one that no cluster has
/// taken (dynamic, WorkTileDispatcher). Each copying thread reads them by itself.
///
/// Note: the static assignment is as balanced as dispatching the longest tile next, as long as all
/// clusters run at the same speed from the same moment on: durations change slowly along the order,
/// so two rounds of opposite direction give every cluster the same, and the last round holds the
/// shortest tiles. It needs no memory.
struct WorkTileReader {
  uint32_t round = 0;

  template <typename Tile>
  __device__ __forceinline__ int read(const KernelParams& p, const SharedMemory<Tile>& shared) {
    const uint32_t parity = round++ % 2;
    if (p.remote_fetch.scratch.data == nullptr) {
      const uint32_t size = cluster_size(), clusters = gridDim.x / size;
      const uint32_t cluster = blockIdx.x / size;
      return (round - 1) * clusters + (parity == 0 ? cluster : clusters - 1 - cluster);
    }
    wait(shared.work_tile_full(), parity);
    return shared.work_tile();
  }

  /// The next work tile may be dispatched.
  template <typename Tile>
  __device__ __forceinline__ void free(const KernelParams& p, const SharedMemory<Tile>& shared) {
    if (p.remote_fetch.scratch.data == nullptr) return;
    if (cluster_size() == 1) {
      arrive(shared.work_tile_free());
    } else {
      arrive_in_cluster(address_in_rank(shared.work_tile_free(), 0));
    }
  }
};

}  // namespace ringattn::cuda::sm90
