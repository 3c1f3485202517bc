// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_selection.h"

// What a thread block works on and with: the shape of its tiles, its shared memory, and the order
// in which it takes its tiles.

namespace ringattn::cuda::sm90 {

constexpr int kWarpgroupSize = 128;
constexpr int kColumnBlock = 64;        // columns that lie together: 128 bytes of a 16-bit type
constexpr int kColumnBlockPitch = 128;  // bytes from row to row
constexpr int kStateBlock = 32;         // the same of float32

// Named barriers: the turns of the consumers, then one for each consumer's own threads.
constexpr int kMostConsumers = 4;
constexpr int kTurnBarrier = 1;
constexpr int kWarpgroupBarrier = kTurnBarrier + kMostConsumers;

/// One warpgroup copies; kConsumers of them attend 64 query rows each. setmaxnreg shares out the
/// registers that the thread block begins with: what the copying one gives back goes to the others.
///   kKeyStages, kValueStages  tiles of keys and of values in shared memory
///   kWithState                results may be a state, in float32
///   kInPairs                  two thread blocks share keys and values, where they can
///   kMostParcelBytes          of what is brought from other devices, in one copy
template <int kHeadDim_, int kConsumers_, int kBlockK_, int kKeyStages_, int kValueStages_,
          bool kWithState, bool kInPairs_, int kMostParcelBytes, int kCopyRegisters_,
          int kConsumerRegisters_>
struct TileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static_assert(kConsumers <= kMostConsumers);
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
  /// What is brought from other devices passes through two parcels at a time.
  static constexpr int kParcels = 2;
  // Barriers (SharedMemory), the first ones of a kind: four that have names of their own, of
  // queries, of buffers, of parcels.
  static constexpr int kQueryBarriers = 4;
  static constexpr int kBufferBarriers = kQueryBarriers + 2 * kConsumers;
  static constexpr int kParcelBarriers = kBufferBarriers + 6 * kMaxStages;
  static constexpr int kBarriers = kParcelBarriers + kParcels;
  // The words in front of them, places for two tiles of each consumer and one for the turn, and
  // behind: what is noted about pieces.
  static constexpr int kTileBytes = 32, kTurnBytes = 8, kPieceWordBytes = 48;
  static constexpr int kWordBytes = 2 * kConsumers * kTileBytes + kTurnBytes;
  static constexpr int kBarrierBytes =
      (kWordBytes + 8 * kBarriers + kPieceWordBytes + 15) / 16 * 16;
  static constexpr int kLoadedBytes =
      kQueryBytes + (kKeyStages + kValueStages) * kKeyBytes + kBarrierBytes;
  static constexpr int kMaxSharedBytes = 232448;
  static constexpr int kStateBlocks = kHeadDim / kStateBlock;
  static constexpr int kStateBytes = kBlockQ * kHeadDim * 4;  // of float32
  static constexpr int kOutBytes = kWithState ? kStateBytes : kQueryBytes;
  /// Where there is room, results leave through memory of their own, those of a state in float32,
  /// into which it comes while the tile is attended; the next queries come in meanwhile. Otherwise
  /// through the memory of the queries, in 16 bits.
  static constexpr bool kSeparateOut = kLoadedBytes + kOutBytes <= kMaxSharedBytes;
  static constexpr bool kStateThroughShared = kSeparateOut && kWithState;
  static constexpr bool kStateThroughL2 = !kSeparateOut && kWithState;
  static constexpr int kOwnBytes = kLoadedBytes + (kSeparateOut ? kOutBytes : 0);
  /// Parcels take what is left. With 1,280 bytes in each on 132 SMs, 340 KB are under way: what
  /// NVLink needs while memory is otherwise idle.
  static constexpr int kParcelBytes =
      std::min(kMostParcelBytes, (kMaxSharedBytes - kOwnBytes) / kParcels / 128 * 128);
  static constexpr int kSharedBytes = kOwnBytes + kParcels * kParcelBytes;
  static_assert(kParcelBytes >= 512);
  static constexpr int kResultBlockBytes =
      kConsumerRows * kColumnBlockPitch;  // of one consumer's rows
  static constexpr int kOutBlockBytes = kSeparateOut ? kResultBlockBytes : kQueryBlockBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// By the largest head dimension. Up to 128 the host chooses between two sizes (tile_selection.h);
// of each there are shapes for calls with a state, for those without, and for those without that
// bring so much that larger parcels pay (WithRoom).
// clang-format off
using Tile64 = TileShape<64, 4, 64, 3, 3, true, false, 4096, 32, 112>;
using Tile128 = TileShape<128, 3, 80, 3, 3, false, true, 1280, 32, 160>;
using Tile128WithRoom = TileShape<128, 3, 80, 3, 3, false, true, 4096, 32, 160>;
using Tile128WithState = TileShape<128, 3, 80, 2, 2, true, true, 4096, 32, 160>;
using SmallTile128 = TileShape<128, 2, 128, 3, 2, false, true, 4096, 40, 232>;
using SmallTile128WithRoom = TileShape<128, 2, 128, 2, 2, false, true, 4096, 40, 232>;
using SmallTile128WithState = TileShape<128, 2, 128, 2, 2, true, true, 4096, 40, 232>;
using Tile256 = TileShape<256, 2, 80, 2, 2, true, true, 4096, 40, 232>;
// clang-format on
static_assert(Tile128::kBlockQ == kLargeTile.rows && Tile128::kBlockK == kLargeTile.keys);
static_assert(SmallTile128::kBlockQ == kSmallTile.rows && SmallTile128::kBlockK == kSmallTile.keys);
static_assert(Tile64::kBlockQ == kTile64.rows && Tile64::kBlockK == kTile64.keys);
static_assert(Tile256::kBlockQ == kTile256.rows && Tile256::kBlockK == kTile256.keys);

/// What comes in tiles of kBlockK rows.
enum Operand { kKeys, kValues };

/// One tile of queries of one head.
struct QueryTile {
  int first_row;  // negative: none, there are no more tiles
  int rows_end;   // first_row or less: of two row tiles the second one, which has no rows
  int turn_end;   // of the rows that the cluster attends, all of which walk over the same keys
  int batch;
  int head;
  uint32_t state_parity;  // of the state's phase, if it is loaded: known when the tile is announced

  __device__ __forceinline__ bool exists() const { return first_row >= 0; }
};

/// Tiles of keys that rows of the turn up to `rows_end` see something of.
template <typename Tile>
__device__ __forceinline__ int tiles_seen(const KeyBounds& keys, const QueryTile& tile,
                                          int rows_end) {
  // A row that exists. The first one does where tiles are alone, and leaves their loops shorter.
  const int row = Tile::kInPairs ? tile.turn_end - 1 : tile.first_row;
  return keys.tiles_seen(row, rows_end, Tile::kBlockK);
}

/// What the 64 rows of a consumer see of a segment, in tiles of keys.
struct SeenKeys {
  int tiles;     // that the turn's last row sees something of
  int own;       // the first so many, that a row of these does
  int unmasked;  // the first so many, that all of these see whole
};

///   first_row: of the 64; without a row among them, `own` and `unmasked` say nothing
template <typename Tile>
__device__ __forceinline__ SeenKeys seen_keys(const KeyBounds& keys, const QueryTile& tile,
                                              int first_row) {
  const int by_first = min(keys.num_keys, first_row + 1 + keys.diagonal);
  return {tiles_seen<Tile>(keys, tile, tile.turn_end),
          tiles_seen<Tile>(keys, tile, min(first_row + kConsumerRows, tile.rows_end)),
          max(by_first, 0) / Tile::kBlockK};
}

/// The next segment that the turn sees something of.
template <typename Tile, int kSegments>
__device__ __forceinline__ int seen_segment(const SegmentedParams<kSegments>& p,
                                            const QueryTile& tile, int segment) {
  while (segment < p.num_segments && tiles_seen<Tile>(p.keys[segment], tile, tile.turn_end) == 0) {
    ++segment;
  }
  return segment;
}

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
  /// Of a consumer's 64 rows: column blocks of 16-bit results, kOutBlockBytes apart, or of float32
  /// ones, kResultBlockBytes apart.
  __device__ __forceinline__ uint32_t results(int consumer) const {
    return Tile::kSeparateOut ? buffer(kValues, Tile::kValueStages) +
                                    consumer * (Tile::kOutBytes / Tile::kConsumers)
                              : queries(consumer);
  }

  /// Each buffer has a barrier that says that it is full (the copy engine has written it) and one
  /// that says that it is free (every consumer has read it, or the one whose queries these are).
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
  /// Of the thread block that brings keys or values for all of a cluster: the others' are free.
  __device__ __forceinline__ uint32_t free_elsewhere(Operand operand, uint32_t stage) const {
    return barrier(Tile::kBufferBarriers + (4 + operand) * Tile::kMaxStages + stage);
  }
  /// The turn that was handed out last.
  __device__ __forceinline__ uint32_t turn_full() const { return barrier(2); }
  __device__ __forceinline__ uint32_t turn_free() const { return barrier(3); }

  /// What is brought from another device, on its way through.
  __device__ __forceinline__ uint32_t parcel(uint32_t i) const {
    return words() - (i + 1) * Tile::kParcelBytes;
  }
  __device__ __forceinline__ uint32_t parcel_full(uint32_t i) const {
    return barrier(Tile::kParcelBarriers + i);
  }
  /// What is noted about pieces: kPieceWordBytes of room.
  __device__ __forceinline__ uint32_t piece_words() const { return barrier(Tile::kBarriers); }

  /// The tile that a consumer's queries are of, and what they see of `segment`, the first that the
  /// turn sees something of: written before queries_full, read after it, until these queries are
  /// free. The parity of queries_full tells one from the next, which may be written meanwhile.
  __device__ __forceinline__ void set_tile(int consumer, uint32_t parity, const QueryTile& tile,
                                           uint32_t state_parity, int segment,
                                           const SeenKeys& seen) const {
    const uint32_t to = tile_words(consumer, parity);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(tile.first_row),
                 "r"(tile.turn_end), "r"(tile.batch), "r"(2 * tile.head + state_parity)
                 : "memory");
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + 16), "r"(segment),
                 "r"(seen.tiles), "r"(seen.own), "r"(seen.unmasked)
                 : "memory");
  }
  __device__ __forceinline__ QueryTile tile(int consumer, uint32_t parity) const {
    QueryTile tile;
    uint32_t head;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.first_row), "=r"(tile.turn_end), "=r"(tile.batch), "=r"(head)
                 : "r"(tile_words(consumer, parity))
                 : "memory");
    tile.head = head / 2;
    tile.state_parity = head % 2;
    tile.rows_end = min(tile.first_row + Tile::kBlockQ, tile.turn_end);
    return tile;
  }
  __device__ __forceinline__ SeenKeys first_seen(int consumer, uint32_t parity,
                                                 int& segment) const {
    SeenKeys seen;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(segment), "=r"(seen.tiles), "=r"(seen.own), "=r"(seen.unmasked)
                 : "r"(tile_words(consumer, parity) + 16)
                 : "memory");
    return seen;
  }

  /// Written before turn_full, read after it.
  __device__ __forceinline__ uint32_t turn_word() const {
    return words() + Tile::kWordBytes - Tile::kTurnBytes;
  }
  __device__ __forceinline__ void set_turn(int turn) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(turn_word()), "r"(turn) : "memory");
  }
  __device__ __forceinline__ int turn() const {
    int turn;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(turn) : "r"(turn_word()) : "memory");
    return turn;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
      init_barrier(queries_full(consumer), 1);
      // Each warp by itself: it has read the tile.
      init_barrier(queries_free(consumer), kWarpgroupSize / 32);
    }
    init_barrier(state_full(), 1);
    init_barrier(state_free(), Tile::kConsumers);
    for (const Operand operand : {kKeys, kValues}) {
      const int stages = operand == kKeys ? Tile::kKeyStages : Tile::kValueStages;
      for (int stage = 0; stage < stages; ++stage) {
        init_barrier(full(operand, stage), 1);
        // Keys are freed by each warp, values by a thread of each warpgroup.
        const int warps = operand == kKeys ? kWarpgroupSize / 32 : 1;
        init_barrier(free(operand, stage), warps * Tile::kConsumers);
        if (cluster_size() > 1) init_barrier(free_elsewhere(operand, stage), cluster_size() - 1);
      }
    }
    for (int i = 0; i < Tile::kParcels; ++i) init_barrier(parcel_full(i), 1);
    init_barrier(turn_full(), 1);
    init_barrier(turn_free(), 3 * cluster_size());  // who brings queries, keys, values
    publish_barriers();
  }

 private:
  static_assert(Tile::kSharedBytes % 16 == 0 && Tile::kBarrierBytes % 16 == 0);

  __device__ __forceinline__ uint32_t tile_words(int consumer, uint32_t parity) const {
    return words() + (2 * consumer + parity) * Tile::kTileBytes;
  }
  __device__ __forceinline__ uint32_t barrier(uint32_t i) const {
    return words() + Tile::kWordBytes + 8 * i;
  }
  __device__ __forceinline__ uint32_t words() const {
    return base + Tile::kSharedBytes - Tile::kBarrierBytes;
  }
};

/// A place in a ring of buffers: which one, and the parity of its current phase.
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

/// What this thread block takes in number `turn` of the order.
template <typename Tile, int kSegments>
__device__ __forceinline__ QueryTile query_tile(const SegmentedParams<kSegments>& p, int turn) {
  const TileOrder& order = p.order;
  if constexpr (p.kBringing) turn = p.reordered(turn);
  const int rank = Tile::kInPairs ? cluster_rank() : 0;
  const TileOrder::Taken taken = order.taken(turn, rank, Tile::kBlockQ, p.num_queries);
  // Batch entries of a KV head lie next to each other, as they arrive.
  const int group = taken.head / p.heads_per_kv_head;
  const int kv_head = group / p.batch;

  QueryTile at;
  at.first_row = taken.first_row;
  at.rows_end = min(taken.first_row + Tile::kBlockQ, taken.turn_end);
  at.turn_end = taken.turn_end;
  at.batch = group - kv_head * p.batch;
  at.head = kv_head * p.heads_per_kv_head + taken.head - group * p.heads_per_kv_head;
  return at;
}

/// The turns that this cluster takes: every n-th of n clusters, there and back again, or, where
/// there are words, the next one that nobody has (TurnsHandedOut). Each copying thread goes through
/// them by itself.
///
/// Note: sharing out beforehand is as balanced as handing out the longest tile next, as long as all
/// clusters run at the same speed from the same moment on: lengths rise and fall slowly along the
/// order (query_tile), clusters go through it in rounds of alternating direction, so two rounds
/// give every cluster the same, and the last round holds the shortest tiles. It needs no memory.
struct TurnsTaken {
  uint32_t round = 0;

  template <typename Tile>
  __device__ __forceinline__ int read(const KernelParams& p, const SharedMemory<Tile>& shared) {
    const uint32_t parity = round++ % 2;
    if (p.bringing.words.data == nullptr) {
      const uint32_t size = cluster_size(), clusters = gridDim.x / size;
      const uint32_t cluster = blockIdx.x / size;
      return (round - 1) * clusters + (parity == 0 ? cluster : clusters - 1 - cluster);
    }
    wait(shared.turn_full(), parity);
    return shared.turn();
  }

  /// The next one may be handed out.
  template <typename Tile>
  __device__ __forceinline__ void free(const KernelParams& p, const SharedMemory<Tile>& shared) {
    if (p.bringing.words.data == nullptr) return;
    if (cluster_size() == 1) {
      arrive(shared.turn_free());
    } else {
      arrive_in_cluster(address_in_rank(shared.turn_free(), 0));
    }
  }
};

}  // namespace ringattn::cuda::sm90
