// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>
#include <type_traits>

#include "attention/cuda/key_bounds.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "attention/params.h"

// What the host gives to a kernel: tensor maps, work tiles, and the sources of fetched keys.

namespace ringattn::cuda::sm90 {

// Sizes in which keys are fetched from peers, from small to large:
//
//   vector        16 bytes
//   fetch buffer  shared memory of a thread block that a part of a chunk passes through (tile.cuh)
//   chunk         8 fetch buffers, or a RemotePart: what a thread block takes at a time
//   plane         keys or values of one head and batch entry: [num_keys, D]
//   head group    KV heads that are fetched together: for each group all remote segments
//   segment       keys of one block under one diagonal (KeySegment)

/// The order in which keys are fetched: group after group, for each group segment after segment,
/// plane after plane, in chunks. Arrived chunks are counted by segment and head.
struct FetchOrder {
  uint32_t num_kv_heads;
  uint32_t heads_per_group;
  uint32_t heads_per_arrival;  // heads with one counter: 1 if there are enough counters
  uint32_t planes_per_head;    // keys and values of all batch entries
  uint32_t chunks_per_group;   // of a full group
  uint32_t chunks;             // of all groups

  /// Heads in group `i` of `group_size` heads; the last group may have fewer.
  constexpr uint32_t heads_in(uint32_t i, uint32_t group_size) const {
    const uint32_t left = num_kv_heads - i * group_size;
    return left < group_size ? left : group_size;
  }
};

/// The source of a segment; sizes in vectors.
struct RemoteSegment {
  const uint4* from;  // null: the segment is local
  uint4* to;
  uint32_t from_pitch;  // from one plane to the next
  uint32_t plane_vectors;
  uint32_t chunks_per_plane;
  uint32_t chunks_per_head;  // 0 where the segment is local
  uint32_t* arrivals;        // [H_kv / heads_per_arrival]: arrived chunks
};

/// Of the general variants.
struct ListedSegment : RemoteSegment {
  const RemotePart* parts;  // one chunk each; null: chunks are consecutive
  uint32_t row_vectors;
};

/// Parameters of the kernel. Tensor maps: (D, rows, heads, batch).
struct KernelParams {
  CUtensorMap q;      // in boxes of [64, 64]
  CUtensorMap out;    // [64, 64]; valid where rows are final
  CUtensorMap state;  // [64, 32]; valid where rows are not final, or with fold

  TileScheduler scheduler;
  int num_segments;
  RemoteFetch remote_fetch;
  FetchOrder fetch_order;

  Strided out_memory;    // [B, S_q, H, D], 16-bit
  Strided state_memory;  // [B, S_q, H, D], float32
  float* lse;            // [B, H, S_q]
  int64_t lse_batch_stride;
  int64_t lse_head_stride;

  int batch;
  int num_queries;
  int heads_per_kv_head;
  int head_dim;
  int final_begin;
  int final_end;
  float scale_log2;  // |scale| * log2(e)
  bool negative_scale;
  bool fold;
};

/// What a kernel is compiled for.
enum class Variant {
  kDiagonal,          // segments under diagonals
  kIntervals,         // a range of keys for each row, sinks
  kIntervalsSoftcap,  // and softcap
};

/// Of the general variants alone.
struct GeneralParams {
  const float* sinks;  // [H]; null: none
  // A raw score s becomes tanh(softcap_inner * s), which softmax multiplies by softcap_log2.
  float softcap_inner;
  float softcap_log2;
};
struct NoParams {};

/// Parameters of a kernel for up to kSegments segments. A single segment is local; of several, some
/// may be fetched.
template <int kSegments, Variant kVariant>
struct SegmentedParams
    : KernelParams,
      std::conditional_t<kVariant == Variant::kDiagonal, NoParams, GeneralParams> {
  static constexpr bool kFetches = kSegments > 1;
  static constexpr bool kGeneral = kVariant != Variant::kDiagonal;
  static constexpr bool kReorders = kFetches || kGeneral;
  static constexpr bool kSoftcap = kVariant == Variant::kIntervalsSoftcap;

  struct Maps {
    CUtensorMap k;  // [kBlockK, 64]
    CUtensorMap v;  // [kBlockK, 64]
  } maps[kSegments];
  std::conditional_t<kGeneral, KeyBounds, DiagonalBounds> keys[kSegments];
  std::conditional_t<kGeneral, ListedSegment, RemoteSegment> remote[kSegments];

  /// In place of visible segments, where there are none.
  constexpr int none_visible() const { return kGeneral ? 0 : num_segments; }

  /// What softmax multiplies scores by, in powers of two.
  constexpr float softmax_scale() const {
    if constexpr (kSoftcap) {
      return this->softcap_log2;
    } else {
      return scale_log2;
    }
  }

  /// Where work tiles are dispatched dynamically, those from first_tail_tile on are taken in this
  /// order (rebalance_tail).
  static constexpr int kTailCapacity = kReorders ? kMaxTailTiles : 1;
  int first_tail_tile;
  uint16_t tail_order[kTailCapacity];

  constexpr int reordered(int work_tile) const {
    return work_tile < first_tail_tile ? work_tile
                                       : first_tail_tile + tail_order[work_tile - first_tail_tile];
  }
};

}  // namespace ringattn::cuda::sm90
