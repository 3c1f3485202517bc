// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/backward/kernel_params.h"
#include "attention/cuda/sm90/backward/row_terms.cuh"
#include "attention/cuda/sm90/backward/visible_queries.cuh"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/shared_words.cuh"

// The shapes of tiles, the map of shared memory, and the work tiles that a thread block takes.

namespace ringattn::cuda::sm90 {

constexpr int kGradWarpgroup = 128;    // threads
constexpr int kGradConsumers = 2;      // warpgroups
constexpr int kGradRows = 64;          // keys of a consumer, and rows of a part of dq
constexpr int kGradColumnBlock = 64;   // adjacent columns: 128 bytes of a 16-bit type
constexpr int kGradPitch = 128;        // bytes from row to row of a block of columns
constexpr int kGradFloatColumns = 32;  // the same in float32
constexpr int kTurnBytes = 32;         // of a warp that adds (turns.cuh)

// Named barriers: one of each consumer, and two of each part of dq.
constexpr int kStepBarrier = 1;  // its score gradients are stored, and what it had of dq has left
constexpr int kDqFullBarrier = kStepBarrier + kGradConsumers;
constexpr int kDqFreeBarrier = kDqFullBarrier + kGradConsumers;
// Of pairs: the score gradients of 64 keys are stored.
constexpr int kSendBarrier = kDqFreeBarrier + kGradConsumers;
constexpr int kDqThreads = kGradWarpgroup + 32;  // a consumer, and the warp that adds the part

/// One warpgroup copies; two consumers keep 64 keys each and process the query rows that see them
/// in tiles of kBlockQ. setmaxnreg moves registers from the copying warpgroup to the consumers.
///
/// With kPair two thread blocks, a pair, have the halves of a tile of keys. They send each other
/// their score gradients, and each computes half of the columns of dq over all keys: adds into dq,
/// which take L2 most of its time, are half as many.
///
/// With kScoreRegisters the roles are split, too (split_consumers.cuh): a third computing warpgroup
/// has the scores of 64 keys, one consumer their dv and the other their dk.
template <int kHeadDim_, int kBlockQ_, int kCopyRegisters_, int kConsumerRegisters_,
          bool kPair_ = false, int kScoreRegisters_ = 0>
struct BackwardTileShape {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockQ = kBlockQ_;
  static constexpr bool kPair = kPair_;
  static constexpr bool kSplit = kScoreRegisters_ > 0;
  static_assert(kPair || !kSplit);
  static constexpr int kBlockK = kGradRows * (kSplit ? 1 : kGradConsumers);
  static constexpr int kClusterKeys = kBlockK * (kPair ? 2 : 1);  // of a thread block, or a pair
  static constexpr bool kByTicket = false;
  static constexpr int kQueryStages = kHeadDim <= 64 ? 3 : 2;  // what fits
  static constexpr int kGradOutStages = kSplit ? 1 : 2;
  static constexpr int kScoreGradStages = kSplit ? 1 : kPair || kHeadDim <= 64 ? 2 : 3;
  static constexpr int kProbabilityStages = kSplit ? 2 : 0;
  /// Whether a consumer passes steps whose rows see none of its keys: tiles of more rows than it
  /// has keys hardly make such steps.
  static constexpr bool kSkipsSteps = kBlockQ == kGradRows && !kSplit;
  static constexpr int kScoreRegisters = kScoreRegisters_;
  static constexpr int kCopyRegisters = kCopyRegisters_;
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
  static constexpr int kThreads = (1 + kGradConsumers + kSplit) * kGradWarpgroup;

  static constexpr int kColumnBlocks = kHeadDim / kGradColumnBlock;
  // A part of dq, which one warp adds, has 64 rows.
  static constexpr int kPartColumns = kPair && !kSplit ? kGradFloatColumns : kGradColumnBlock;
  static_assert(kBlockQ / kGradRows * kHeadDim == kGradConsumers * (1 + kPair) * kPartColumns);

  static constexpr int kKeyBlockBytes = kBlockK * kGradPitch;
  static constexpr int kQueryBlockBytes = kBlockQ * kGradPitch;
  static constexpr int kKeyBytes = kColumnBlocks * kKeyBlockBytes;
  static constexpr int kQueryBytes = kColumnBlocks * kQueryBlockBytes;
  // [kBlockK / 64][kBlockQ][64]; of split roles transposed, [kBlockK][64].
  static constexpr int kScoreGradBytes = kBlockQ / kGradColumnBlock * kBlockK * kGradPitch;
  // What dq needs of the pair's other half: the columns of its keys that this one computes.
  static constexpr int kOtherKeyBlocks = kPair ? kColumnBlocks / 2 : 0;
  static constexpr int kOtherKeyBytes = kOtherKeyBlocks * kKeyBlockBytes;
  static constexpr int kOtherScoreGradBytes = kPair ? kScoreGradStages * kScoreGradBytes : 0;
  static constexpr int kDqBlockBytes = kGradRows * kGradPitch;  // [64][32], float32
  static constexpr int kDqBlocks = kPair ? 1 : 2;               // that leave at one time
  static constexpr int kDqBytes = kDqBlocks * kDqBlockBytes;    // of a part
  static constexpr int kTermBytes = kBlockQ * kRowTermBytes;    // of a stage
  // Of a stage. Split roles have no turns, and other pairs no room for a softcap.
  static constexpr bool kHasLse = kSplit || !kPair, kHasTurns = !kSplit;
  static constexpr int kLseBytes = kHasLse ? kBlockQ * 4 : 0;

  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kKeyBytes;
  static constexpr int kOtherKeys = kValues + kKeyBytes;
  static constexpr int kQueries = kOtherKeys + kOtherKeyBytes;
  static constexpr int kGradOut = kQueries + kQueryStages * kQueryBytes;
  static constexpr int kScoreGrads = kGradOut + kGradOutStages * kQueryBytes;
  static constexpr int kOtherScoreGrads = kScoreGrads + kScoreGradStages * kScoreGradBytes;
  static constexpr int kProbabilities = kOtherScoreGrads + kOtherScoreGradBytes;
  static constexpr int kDq = kProbabilities + kProbabilityStages * kScoreGradBytes;
  static constexpr int kTerms = kDq + kGradConsumers * kDqBytes;
  static constexpr int kLse = kTerms + kQueryStages * kTermBytes;
  static constexpr int kBarriers = kLse + kQueryStages * kLseBytes;
  static constexpr int kLoaded = kBarriers + (kPair ? 192 : 128);
  static constexpr int kTickets = kLoaded + 16;
  static constexpr int kTurns = kTickets + 48;
  static constexpr int kOnes = kTurns + kHasTurns * kGradConsumers * kTurnBytes;
  /// Of the row terms' left operands. At D 64 registers are faster; above D 128 nothing else fits.
  static constexpr bool kOnesInShared = kHeadDim > 64 && !kSplit;
  static constexpr int kSharedBytes = kOnes + (kOnesInShared ? kOnesBytes : 0);
  static_assert(kSharedBytes <= 232448);
};

// Registers: of the copying warpgroup, of a consumer, of the one that computes scores alone.
using BackwardTile64 = BackwardTileShape<64, 128, 24, 240>;
using BackwardSoftcapTile64 = BackwardTileShape<64, 128, 40, 232>;
using BackwardTile128 = BackwardTileShape<128, 64, 24, 240>;
using BackwardPair128 = BackwardTileShape<128, 64, 24, 240, true>;
using BackwardTile256 = BackwardTileShape<256, 64, 24, 192, true, 104>;

/// The same shapes, for tiles of keys of any lengths: a thread block, or a pair, takes the next one
/// when it is done with one.
template <typename Shape>
struct ByTicket : Shape {
  static constexpr bool kByTicket = true;
};

/// What the two loading warps load: keys and, for each step, queries with their statistics; or
/// values and gradients of out.
enum GradOperand { kScoreOperand, kProbabilityOperand };

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/// threadIdx.x, read where it is needed: what follows from it is not kept in registers.
__device__ __forceinline__ uint32_t volatile_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// The first of a thread's two keys, within the tile; the other is 8 behind it.
__device__ __forceinline__ int key_of_thread(int thread) {
  return thread % kGradWarpgroup / 32 * 16 + thread % 32 / 4;
}

/// Zeros in 16-byte vectors of a swizzled tile [blocks][rows][64]: all of a row.
__device__ __forceinline__ void clear_row(uint32_t tile, int blocks, uint32_t block_bytes,
                                          int row) {
#pragma unroll 1
  for (int i = 0; i < blocks * 8; ++i) {
    store_words(tile + i / 8 * block_bytes + row * kGradPitch + i % 8 * 16, {});
  }
}

/// Where lse of a query row lies: columns 8n + 2t and the next one of an even n, then
/// those of n + 1, for a lane to read all four at once.
__device__ __forceinline__ int lse_position(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}

/// A position in a ring of buffers: the stage, and the parity of its current phase.
template <int kStages>
struct StagePosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  /// After that many steps: one number for several rings spares registers.
  static __device__ __forceinline__ StagePosition of(uint32_t steps) {
    static_assert(kStages <= 2);  // which is one bit of it
    return {steps % kStages, steps / kStages % 2};
  }
  __device__ __forceinline__ void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

/// The rank of this thread block in its cluster of two. The compiler knows that it is the same in
/// all threads, which it does not of cluster_rank(): uniform registers hold what follows from it.
__device__ __forceinline__ int rank_in_pair() { return blockIdx.x % 2; }

template <typename Tile>
struct BackwardShared {
  uint32_t base;  // aligned to 1024 bytes

  static constexpr int stages(GradOperand operand) {
    return operand == kScoreOperand ? Tile::kQueryStages : Tile::kGradOutStages;
  }

  /// Keys, or values.
  __device__ __forceinline__ uint32_t stationary(GradOperand operand) const {
    return base + (operand == kScoreOperand ? Tile::kKeys : Tile::kValues);
  }
  /// Queries, or gradients of out.
  __device__ __forceinline__ uint32_t moving(GradOperand operand, uint32_t stage) const {
    return base + (operand == kScoreOperand ? Tile::kQueries : Tile::kGradOut) +
           stage * Tile::kQueryBytes;
  }
  /// Of a stage of queries: what each row adds to s and dp (row_terms.cuh).
  __device__ __forceinline__ uint32_t row_terms(uint32_t stage) const {
    return base + Tile::kTerms + stage * Tile::kTermBytes;
  }
  __device__ __forceinline__ uint32_t ones() const { return base + Tile::kOnes; }
  /// The terms of a kind, for a consumer.
  template <RowTermKind kKind>
  __device__ __forceinline__ auto terms(uint32_t stage) const {
    return RowTerms<kKind, Tile::kOnesInShared>(row_terms(stage),
                                                Tile::kOnesInShared ? ones() : volatile_thread());
  }
  /// Of a stage of queries: -lse * log2(e) of each row, which a softcap needs.
  __device__ __forceinline__ uint32_t minus_lse(uint32_t stage) const {
    return base + Tile::kLse + stage * Tile::kLseBytes;
  }
  __device__ __forceinline__ uint32_t score_grads(uint32_t stage) const {
    return base + Tile::kScoreGrads + stage * Tile::kScoreGradBytes;
  }

  // Of a pair, what the other thread block has: the keys, and their score gradients.
  __device__ __forceinline__ uint32_t other_keys() const { return base + Tile::kOtherKeys; }
  __device__ __forceinline__ uint32_t other_score_grads(uint32_t stage) const {
    return base + Tile::kOtherScoreGrads + stage * Tile::kScoreGradBytes;
  }

  // Of split roles:

  /// What the products with an operand that moves are weighted by: score gradients, or
  /// probabilities, both transposed.
  __device__ __forceinline__ uint32_t weights(GradOperand operand, uint32_t stage) const {
    return base + (operand == kScoreOperand ? Tile::kScoreGrads : Tile::kProbabilities) +
           stage * Tile::kScoreGradBytes;
  }

  __device__ __forceinline__ uint32_t dq(int part) const {
    return base + Tile::kDq + part * Tile::kDqBytes;
  }

  __device__ __forceinline__ uint32_t stationary_full(GradOperand operand) const {
    return base + Tile::kBarriers + 8 * operand;
  }
  __device__ __forceinline__ uint32_t stationary_free() const {
    return base + Tile::kBarriers + 16;
  }
  __device__ __forceinline__ uint32_t full(GradOperand operand, uint32_t stage) const {
    return base + Tile::kBarriers + (operand == kScoreOperand ? 24 : 48) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t free(GradOperand operand, uint32_t stage) const {
    return base + Tile::kBarriers + (operand == kScoreOperand ? 72 : 96) + 8 * stage;
  }

  /// A tile with rows to be made 0 is there (load_grad_operand).
  __device__ __forceinline__ uint32_t loaded(GradOperand operand) const {
    return base + Tile::kLoaded + 8 * operand;
  }

  /// What other ranks of the cluster send (cluster_sum.cuh): over the stages that move, and of ds.
  __device__ __forceinline__ uint32_t exchange() const { return base + Tile::kQueries; }
  __device__ __forceinline__ uint32_t exchange_free() const { return base + Tile::kBarriers + 112; }
  __device__ __forceinline__ uint32_t exchange_full() const { return base + Tile::kBarriers + 120; }

  // Of a pair: both thread blocks have read a stage of score gradients, here and there; those of
  // the other thread block are there.
  __device__ __forceinline__ uint32_t score_grads_free(uint32_t stage) const {
    return base + Tile::kBarriers + 152 + 8 * stage;
  }
  __device__ __forceinline__ uint32_t other_score_grads_full(uint32_t stage) const {
    return base + Tile::kBarriers + 176 + 8 * stage;
  }

  // Of split roles:

  __device__ __forceinline__ uint32_t weights_full(GradOperand operand, uint32_t stage) const {
    return base + Tile::kBarriers + (operand == kScoreOperand ? 128 : 136) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t weights_free(GradOperand operand, uint32_t stage) const {
    return operand == kScoreOperand ? score_grads_free(stage)
                                    : base + Tile::kBarriers + 160 + 8 * stage;
  }

  __device__ __forceinline__ uint32_t turns(int consumer) const {
    return base + Tile::kTurns + consumer * kTurnBytes;
  }

  /// Two slots, in turns.
  __device__ __forceinline__ uint32_t ticket(int slot) const {
    return base + Tile::kTickets + 4 * slot;
  }
  __device__ __forceinline__ uint32_t ticket_full(int slot) const {
    return base + Tile::kTickets + 16 + 8 * slot;
  }
  __device__ __forceinline__ uint32_t ticket_free(int slot) const {
    return base + Tile::kTickets + 32 + 8 * slot;
  }

  __device__ __forceinline__ void init_barriers(int ranks) const {
    constexpr int kWarps = kGradWarpgroup / 32, kConsumerWarps = kGradConsumers * kWarps;
    init_barrier(stationary_free(), kConsumerWarps + (Tile::kSplit ? kWarps : 0));
    if (ranks > 1) {
      init_barrier(exchange_free(), (ranks - 1) * kConsumerWarps);
      init_barrier(exchange_full(), (ranks - 1) * kConsumerWarps);
    }
    for (const GradOperand operand : {kScoreOperand, kProbabilityOperand}) {
      init_barrier(stationary_full(operand), 1);
      init_barrier(loaded(operand), 1);
      for (int stage = 0; stage < stages(operand); ++stage) {
        init_barrier(full(operand, stage), 1);
        // Each warp waits for its own products. Of split roles two read an operand, too.
        init_barrier(free(operand, stage), kConsumerWarps);
      }
    }
    // All warps but the one that takes a ticket free it. Where it is drawn for a pair, the warp
    // that takes it in the other thread block arrives as well, when all warps there have freed the
    // slot.
    const bool draws_for_pair = Tile::kByTicket && Tile::kPair && rank_in_pair() == 0;
    for (const int slot : {0, 1}) {
      init_barrier(ticket_full(slot), 1);
      init_barrier(ticket_free(slot), Tile::kThreads / 32 - 1 + draws_for_pair);
    }
    if constexpr (Tile::kPair) {
      for (int stage = 0; stage < Tile::kScoreGradStages; ++stage) {
        // By those who compute dq: of split roles both consumers, else one of them.
        init_barrier(score_grads_free(stage), 2 * (Tile::kSplit ? kConsumerWarps : kWarps));
        init_barrier(other_score_grads_full(stage), Tile::kSplit ? 1 : kGradConsumers);
      }
    }
    if constexpr (Tile::kSplit) init_split_barriers();
    publish_barriers();
  }

 private:
  __device__ __forceinline__ void init_split_barriers() const {
    constexpr int kWarps = kGradWarpgroup / 32;
    for (int stage = 0; stage < Tile::kProbabilityStages; ++stage) {
      init_barrier(weights_full(kProbabilityOperand, stage), kWarps);
      init_barrier(weights_free(kProbabilityOperand, stage), kWarps);
    }
    init_barrier(weights_full(kScoreOperand, 0), kWarps);
  }
};

/// A work tile: keys of one KV head, and the tiles of query rows that see them.
struct KeyTile {
  int first_key;
  int kv_head;
  int batch;
  QueryRange rows;  // that may see keys
  int begin, end;   // their query tiles
  bool descending;  // the later query tiles first
  int first;        // where steps begin; by ticket they go on at the other end

  __device__ __forceinline__ bool empty() const { return begin >= end; }
  __device__ __forceinline__ int steps(int heads) const {
    return empty() ? 0 : heads * (end - begin);
  }
};

/// The steps of a work tile: query tile after query tile, for each the heads of the group, or the
/// rank's part of them.
struct Step {
  int query_tile;
  int head;  // of the part

  __device__ __forceinline__ explicit Step(const KeyTile& tile) : query_tile(tile.first), head(0) {}
  template <typename Tile>
  __device__ __forceinline__ void advance(const KeyTile& tile, int heads) {
    if (++head < heads) return;
    head = 0;
    query_tile += tile.descending ? -1 : 1;
    if constexpr (Tile::kByTicket) {
      if (query_tile == tile.end) query_tile = tile.begin;
      if (query_tile < tile.begin) query_tile = tile.end - 1;
    }
  }
};

template <typename Tile>
__device__ __forceinline__ KeyTile key_tile(const BackwardKernelParams& p, int index, int plane,
                                            bool descending) {
  KeyTile tile;
  VisibleQueries rows;
  if constexpr (Tile::kPair) {
    // Each rank has a half of the keys, and passes the rows that see a key of either.
    tile.first_key = index * Tile::kClusterKeys + rank_in_pair() * Tile::kBlockK;
    rows = visible_queries<Tile::kClusterKeys>(p.bounds, index * Tile::kClusterKeys);
  } else {
    tile.first_key = index * Tile::kBlockK;
    rows = visible_queries<Tile::kBlockK>(p.bounds, tile.first_key);
  }
  tile.batch = plane / p.num_kv_heads;
  tile.kv_head = plane - tile.batch * p.num_kv_heads;
  tile.descending = descending;
  tile.rows = rows.some;
  const QueryTiles tiles = tiles_with<Tile::kBlockQ>(rows.some);
  tile.begin = tiles.begin, tile.end = tiles.end;
  tile.first = tile.descending ? tile.end - 1 : tile.begin;
  if constexpr (Tile::kByTicket) {
    // Where not all keys are seen by the last row: under a window (and in tiles of two documents,
    // which any order serves). Neighbouring tiles see shifted rows. When each begins at a multiple
    // of its number of query tiles, they are at the same rows at one time, which L2 holds.
    if (!tile.empty() && rows.all.end < rows.some.end && p.progress == nullptr) {
      const int count = tile.end - tile.begin;
      const int multiple = (tile.begin + count - 1) / count * count;  // one of the query tiles
      if (!tile.descending) tile.first = multiple;
      if (tile.descending && multiple > tile.begin) tile.first = multiple - 1;
    }
  }
  return tile;
}

/// The next ticket of a thread block, or of a pair: one warp takes it, and hands it to all others.
/// Of a pair the first thread block draws it, and sends it to the second.
///   count  of tickets before
template <typename Tile, bool kTakes>
__device__ __forceinline__ int next_ticket(const BackwardKernelParams& p,
                                           const BackwardShared<Tile>& shared, int count) {
  const int slot = count % 2, parity = count / 2 % 2;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  int ticket = 0;
  if constexpr (kTakes) wait(shared.ticket_free(slot), parity ^ 1);
  if (kTakes && (!Tile::kPair || rank_in_pair() == 0)) {
    if (is_first_lane) ticket = atomicAdd(p.next_ticket, 1);
    ticket = __shfl_sync(0xffffffff, ticket, 0);
    if (is_first_lane) {
      store_shared(shared.ticket(slot), ticket);
      arrive(shared.ticket_full(slot));
      if constexpr (Tile::kPair) {
        send_value(address_in_rank(shared.ticket(slot), 1), ticket,
                   address_in_rank(shared.ticket_full(slot), 1));
      }
    }
    return ticket;
  }
  if (kTakes && is_first_lane) {
    arrive_expecting(shared.ticket_full(slot), sizeof(ticket));
    // Both slots are free before the first two tickets.
    if (count >= 2) arrive_in_cluster(address_in_rank(shared.ticket_free(slot), 0));
  }
  wait(shared.ticket_full(slot), parity);
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(ticket) : "r"(shared.ticket(slot)) : "memory");
  __syncwarp();
  if (!kTakes && is_first_lane) arrive(shared.ticket_free(slot));
  return __shfl_sync(0xffffffff, ticket, 0);
}

/// The work tiles of a cluster: calls visit(KeyTile).
///
/// In rounds, each cluster has one in each, in alternating direction. By ticket, a thread block or
/// a pair takes the next one when it is done with one; when its adds into dq are in turn
/// (turns.cuh), all go down from the last rows.
template <typename Tile, bool kTakes, typename Visit>
__device__ __forceinline__ void for_each_key_tile(const BackwardKernelParams& p,
                                                  const BackwardShared<Tile>& shared,
                                                  const Visit& visit) {
  const int planes = p.batch * p.num_kv_heads;
  if constexpr (Tile::kByTicket) {
    const uint32_t clusters = gridDim.x / (Tile::kPair ? 2 : 1);
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int ticket = next_ticket<Tile, kTakes>(p, shared, count);
      if (ticket >= planes * p.num_key_tiles) return;
      const int slice = ticket / (p.planes_per_slice * p.num_key_tiles);
      const int first_plane = slice * p.planes_per_slice;
      const int slice_planes = min(p.planes_per_slice, planes - first_plane);
      const int work_tile = ticket - first_plane * p.num_key_tiles;
      const int index = work_tile / slice_planes;
      visit(key_tile<Tile>(p, index, first_plane + work_tile - index * slice_planes,
                           p.progress != nullptr || ticket / clusters % 2 == 0));
    }
  } else {
    const int ranks = Tile::kPair ? 2 : p.ranks;
    const int clusters = gridDim.x / ranks, cluster = blockIdx.x / ranks;
#pragma unroll 1
    for (int first_plane = 0; first_plane < planes; first_plane += p.planes_per_slice) {
      const int slice_planes = min(p.planes_per_slice, planes - first_plane);
      const int work_tiles = slice_planes * p.num_key_tiles;
#pragma unroll 1
      for (int round = 0; round * clusters < work_tiles; ++round) {
        const bool descending = round % 2 == 0;
        const int work_tile = round * clusters + (descending ? cluster : clusters - 1 - cluster);
        if (work_tile >= work_tiles) continue;
        const int index = work_tile / slice_planes;
        visit(key_tile<Tile>(p, index, first_plane + work_tile - index * slice_planes, descending));
      }
    }
  }
}

}  // namespace ringattn::cuda::sm90
