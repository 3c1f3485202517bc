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
constexpr int kStages = 2;              // tiles of keys (and of values) in shared memory

/// One warpgroup copies; kConsumers of them attend 64 query rows each. setmaxnreg shares out the
/// 65536 registers: what the copying one gives back goes to the others.
///   kPingPong: consumers take turns, so that one's products run under another's softmax. Measured
///   for each instantiation; without it they drift into that by themselves, or not.
template <int kHeadDim_, int kConsumers_, int kBlockK_, bool kPingPong_, int kProducerRegisters_,
          int kConsumerRegisters_>
struct TileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kBlockQ = 64 * kConsumers;
  static constexpr int kBlockK = kBlockK_;
  static constexpr bool kPingPong = kPingPong_;
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
  /// Where there is room, results leave through memory of their own, and the next queries come in
  /// meanwhile; otherwise through that of the queries.
  static constexpr bool kSeparateOut = kLoadedBytes + kQueryBytes + kAlignment <= kMaxSharedBytes;
  static constexpr int kSharedBytes = kLoadedBytes + (kSeparateOut ? kQueryBytes : 0) + kAlignment;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

template <int kHeadDim>
struct TileFor;
// clang-format off
template <> struct TileFor<64> : TileShape<64, 3, 128, true, 32, 160> {};
template <> struct TileFor<128> : TileShape<128, 2, 128, false, 24, 240> {};
template <> struct TileFor<256> : TileShape<256, 2, 80, true, 24, 240> {};
// clang-format on

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
  __device__ __forceinline__ uint32_t results() const {
    return Tile::kSeparateOut ? keys(2 * kStages) : queries();
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

  __device__ __forceinline__ void init_barriers() const {
    init_barrier(queries_full(), 1);
    init_barrier(queries_free(), Tile::kConsumers);
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

/// One tile of queries of one head, and the keys it sees.
template <typename Tile>
struct QueryTile {
  int batch;
  int head;
  int kv_head;
  int first_row;
  int key_tiles;       // that the tile's last row sees something of
  int unmasked_tiles;  // the first so many are seen whole by all its rows

  __device__ __forceinline__ QueryTile(const KernelParams& p, int tile) {
    const TileOrder& order = p.order;
    const int slice = tile / order.slice_tiles;
    const int in_slice = tile - slice * order.slice_tiles;
    const int first_head = slice * order.heads_per_slice;
    const int heads = min(order.heads_per_slice, order.heads - first_head);
    const int row_of_tiles = in_slice / heads;
    const int head_of_all = first_head + in_slice - row_of_tiles * heads;
    batch = head_of_all / p.num_heads;
    head = head_of_all - batch * p.num_heads;
    kv_head = head / p.heads_per_kv_head;
    // Slices are walked longest tile first, shortest first, and so on; the last one longest first.
    const bool longest_first = (order.slices - 1 - slice) % 2 == 0;
    first_row =
        (longest_first ? order.query_tiles - 1 - row_of_tiles : row_of_tiles) * Tile::kBlockQ;

    const int rows_end = min(first_row + Tile::kBlockQ, p.num_queries);
    const int seen_by_last = min(p.segment.num_keys, rows_end + p.segment.diagonal);
    const int seen_by_first = min(p.segment.num_keys, first_row + 1 + p.segment.diagonal);
    key_tiles = (max(seen_by_last, 0) + Tile::kBlockK - 1) / Tile::kBlockK;
    unmasked_tiles = max(seen_by_first, 0) / Tile::kBlockK;
  }
};

/// The tiles of this thread block: every gridDim.x-th, there and back again.
///
/// Note: nothing is handed out at run time, so there is no counter to reset, and calls on several
/// streams or in graphs cannot disturb each other. It is as balanced as handing out the longest
/// tile next: lengths rise and fall slowly along the order (QueryTile), blocks go through it in
/// turns of alternating direction, so two turns give every block the same, and the last turn holds
/// the shortest tiles.
struct TileSchedule {
  int turn = 0;

  __device__ __forceinline__ int tile() const {
    const int block = turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return turn * gridDim.x + block;
  }
};

}  // namespace ringattn::cuda::sm90
