// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"

// What a thread block works on and with: the shape of its tiles, its shared memory, and the order
// in which it takes its tiles.

namespace ringattn::cuda::sm90 {

constexpr int kWarpgroupSize = 128;
constexpr int kColumnBlock = 64;        // columns that lie together: 128 bytes of a 16-bit type
constexpr int kColumnBlockPitch = 128;  // bytes from row to row
constexpr int kStateBlock = 32;         // the same of float32
constexpr int kStages = 2;              // tiles of keys (and of values) in shared memory

// Named barriers: the turns of the consumers, then one for each consumer's own threads.
constexpr int kTurnBarrier = 1;
constexpr int kWarpgroupBarrier = 4;

/// Consumers take turns, so that one's products run under another's softmax. Measured for each tile
/// shape: a turn ends once both products are issued (the first scores of a tile of queries, which
/// stand alone, have a turn of their own), or later, once the maxima of the scores are found: then
/// the second product is nearly done, and the next consumer's do not slow it down.
enum class TurnEnds { kIssued, kMaximaFound };

/// One warpgroup copies; kConsumers of them attend 64 query rows each. setmaxnreg shares out the
/// 65536 registers: what the copying one gives back goes to the others.
template <int kHeadDim_, int kConsumers_, int kBlockK_, TurnEnds kTurnEnds_,
          int kProducerRegisters_, int kConsumerRegisters_>
struct TileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kBlockQ = 64 * kConsumers;
  static constexpr int kBlockK = kBlockK_;
  static constexpr TurnEnds kTurnEnds = kTurnEnds_;
  static constexpr int kProducerRegisters = kProducerRegisters_;
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 512);

  static constexpr int kColumnBlocks = kHeadDim / kColumnBlock;
  static constexpr int kQueryBlockBytes = kBlockQ * kColumnBlockPitch;  // of one column block
  static constexpr int kKeyBlockBytes = kBlockK * kColumnBlockPitch;
  static constexpr int kQueryBytes = kColumnBlocks * kQueryBlockBytes;
  static constexpr int kKeyBytes = kColumnBlocks * kKeyBlockBytes;
  static_assert(kKeyBlockBytes % 1024 == 0);

  static constexpr int kAlignment = 1024;  // of the 128-byte swizzle
  static constexpr int kBarrierBytes = 128;
  static constexpr int kLoadedBytes = kQueryBytes + 2 * kStages * kKeyBytes + kBarrierBytes;
  static constexpr int kMaxSharedBytes = 232448;
  static constexpr int kStateBlocks = kHeadDim / kStateBlock;
  static constexpr int kStateBytes = kBlockQ * kHeadDim * 4;  // of float32
  /// Where there is room, results leave through memory of their own, in float32 too, into which the
  /// state comes while the tile is attended; the next queries come in meanwhile. Otherwise through
  /// the memory of the queries, in 16 bits.
  static constexpr bool kSeparateOut = kLoadedBytes + kStateBytes + kAlignment <= kMaxSharedBytes;
  static constexpr int kSharedBytes = kLoadedBytes + (kSeparateOut ? kStateBytes : 0) + kAlignment;
  static constexpr int kResultBlockBytes = 64 * kColumnBlockPitch;  // of one consumer's rows
  static constexpr int kOutBlockBytes = kSeparateOut ? kResultBlockBytes : kQueryBlockBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

template <int kHeadDim>
struct TileFor;
// clang-format off
template <> struct TileFor<64> : TileShape<64, 3, 128, TurnEnds::kIssued, 32, 160> {};
template <> struct TileFor<128> : TileShape<128, 2, 128, TurnEnds::kMaximaFound, 24, 240> {};
template <> struct TileFor<256> : TileShape<256, 2, 80, TurnEnds::kIssued, 24, 240> {};
// clang-format on

/// One tile of queries of one head.
struct QueryTile {
  int first_row;  // negative: none, there are no more tiles
  int rows_end;
  int batch;
  int head;
  uint32_t state_parity;  // of the state's phase, if it is loaded: known when the tile is announced

  __device__ __forceinline__ bool exists() const { return first_row >= 0; }
};

/// Addresses in shared memory.
template <typename Tile>
struct SharedMemory {
  uint32_t base;

  __device__ __forceinline__ explicit SharedMemory(const void* dynamic)
      : base((shared_address(dynamic) + Tile::kAlignment - 1) & ~(Tile::kAlignment - 1)) {}

  __device__ __forceinline__ uint32_t queries() const { return base; }
  __device__ __forceinline__ uint32_t keys(uint32_t stage) const {
    return base + Tile::kQueryBytes + stage * Tile::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t values(uint32_t stage) const { return keys(kStages + stage); }
  /// Of a consumer's 64 rows: column blocks of 16-bit results, kOutBlockBytes apart, or of float32
  /// ones, kResultBlockBytes apart.
  __device__ __forceinline__ uint32_t results(int consumer) const {
    return Tile::kSeparateOut
               ? keys(2 * kStages) + consumer * Tile::kStateBlocks * Tile::kResultBlockBytes
               : queries() + consumer * Tile::kResultBlockBytes;
  }

  /// Each buffer has a barrier that says that it is full (the copy engine has written it) and one
  /// that says that it is free (every consumer has read it).
  __device__ __forceinline__ uint32_t queries_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t queries_free() const { return barrier(1); }
  __device__ __forceinline__ uint32_t keys_full(uint32_t stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t keys_free(uint32_t stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ uint32_t values_full(uint32_t stage) const {
    return barrier(6 + stage);
  }
  __device__ __forceinline__ uint32_t values_free(uint32_t stage) const {
    return barrier(8 + stage);
  }
  __device__ __forceinline__ uint32_t state_full() const { return barrier(12); }
  __device__ __forceinline__ uint32_t state_free() const { return barrier(13); }

  /// The tile whose queries these are: written before queries_full, read after it.
  __device__ __forceinline__ void set_tile(const QueryTile& tile, uint32_t state_parity) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(barrier(10)), "r"(tile.first_row),
                 "r"(tile.rows_end), "r"(tile.batch), "r"(tile.head)
                 : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(barrier(14)), "r"(state_parity) : "memory");
  }
  __device__ __forceinline__ QueryTile tile() const {
    QueryTile tile;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.first_row), "=r"(tile.rows_end), "=r"(tile.batch), "=r"(tile.head)
                 : "r"(barrier(10))
                 : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tile.state_parity) : "r"(barrier(14)) : "memory");
    return tile;
  }

  __device__ __forceinline__ void init_barriers() const {
    init_barrier(queries_full(), 1);
    // Each warp by itself: its threads have read the tile.
    init_barrier(queries_free(), Tile::kConsumers * kWarpgroupSize / 32);
    init_barrier(state_full(), 1);
    init_barrier(state_free(), Tile::kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(keys_full(stage), 1);
      init_barrier(keys_free(stage), Tile::kConsumers);
      init_barrier(values_full(stage), 1);
      init_barrier(values_free(stage), Tile::kConsumers);
    }
    publish_barriers();
  }

 private:
  __device__ __forceinline__ uint32_t barrier(uint32_t i) const {
    return base + Tile::kSharedBytes - Tile::kAlignment - Tile::kBarrierBytes + 8 * i;
  }
};

/// A place in a ring of two buffers: which one, and the parity of its current phase.
struct RingPosition {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2; }
  __device__ __forceinline__ RingPosition previous() const { return {count - 1}; }
};

/// Number `tile` in the order.
template <typename Tile>
__device__ __forceinline__ QueryTile query_tile(const KernelParams& p, int tile) {
  const TileOrder& order = p.order;
  const bool is_late = tile < order.late_tiles;
  const int in_part = is_late ? tile : tile - order.late_tiles;
  const int row_tiles = is_late ? order.late_row_tiles : order.early_row_tiles;
  const int slice = in_part / (order.heads_per_slice * row_tiles);
  const int in_slice = in_part - slice * order.heads_per_slice * row_tiles;
  const int first_head = slice * order.heads_per_slice;
  const int heads = min(order.heads_per_slice, order.heads - first_head);
  const int row_of_tiles = in_slice / heads;
  // Slices are walked longest tile first, shortest first, and so on; the last one longest first.
  const bool longest_first = (order.slices - 1 - slice) % 2 == 0;
  const int row_tile = longest_first ? row_tiles - 1 - row_of_tiles : row_of_tiles;
  // Batch entries of a KV head lie next to each other, as they arrive.
  const int head_of_all = first_head + in_slice - row_of_tiles * heads;
  const int group = head_of_all / p.heads_per_kv_head;
  const int kv_head = group / p.batch;

  QueryTile at;
  at.first_row = (is_late ? order.split : 0) + row_tile * Tile::kBlockQ;
  at.rows_end = min(at.first_row + Tile::kBlockQ, is_late ? p.num_queries : order.split);
  at.batch = group - kv_head * p.batch;
  at.head = kv_head * p.heads_per_kv_head + head_of_all - group * p.heads_per_kv_head;
  return at;
}

/// What a tile of queries sees of a segment, in tiles of keys.
template <typename Tile>
struct SeenKeys {
  int tiles;     // that the last row sees something of
  int unmasked;  // the first so many are seen whole by all rows

  __device__ __forceinline__ SeenKeys(const KeyBounds& keys, const QueryTile& tile) {
    const bool any = tile.first_row >= keys.first_query;
    const int by_last = any ? min(keys.num_keys, tile.rows_end + keys.diagonal) : 0;
    const int by_first = min(keys.num_keys, tile.first_row + 1 + keys.diagonal);
    tiles = (max(by_last, 0) + Tile::kBlockK - 1) / Tile::kBlockK;
    unmasked = max(by_first, 0) / Tile::kBlockK;
  }
};

/// The tiles that this thread block takes: every gridDim.x-th, there and back again, or, where
/// there are words, the next one that nobody has.
///
/// Note: sharing out beforehand is as balanced as handing out the longest tile next, as long as all
/// blocks run at the same speed from the same moment on: lengths rise and fall slowly along the
/// order (query_tile), blocks go through it in turns of alternating direction, so two turns give
/// every block the same, and the last turn holds the shortest tiles. It needs no memory.
struct TileSchedule {
  int turn = 0;

  __device__ __forceinline__ int take(const LaunchWords& words) {
    if (words.data != nullptr) return atomicAdd(words.data + LaunchWords::kTilesTaken, 1);
    const int block = turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return turn++ * gridDim.x + block;
  }
};

}  // namespace ringattn::cuda::sm90
