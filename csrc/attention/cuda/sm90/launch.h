// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "attention/params.h"

// The kernel family for compute capability 9.0 (Hopper): float16 and bfloat16. Kernels are
// instantiated in files of their own (instantiations/).

namespace ringattn::cuda::sm90 {

/// The order in which keys are brought: slices of KV heads, of each all segments that have a
/// source, plane by plane, in pieces (remote_fetch.cuh). Pieces are counted by segments and heads.
struct BringOrder {
  uint32_t num_kv_heads;
  uint32_t heads_per_slice;
  uint32_t heads_per_arrival;  // that are counted together: 1 where there are words enough
  uint32_t planes_per_head;    // keys and values of all batch entries
  uint32_t pieces_per_slice;   // of a whole one
  uint32_t pieces;

  /// Of part `i` of so many heads each: the last one may have fewer.
  constexpr uint32_t heads_of(uint32_t i, uint32_t heads_per_part) const {
    const uint32_t left = num_kv_heads - i * heads_per_part;
    return left < heads_per_part ? left : heads_per_part;
  }
};

/// A segment that is brought; in units of 16 bytes.
struct BroughtKeys {
  const uint4* from;  // null: it is there already
  uint4* to;
  uint32_t from_pitch;  // from plane to plane
  uint32_t plane_units;
  uint32_t pieces_per_plane;
  uint32_t pieces_per_head;  // 0 where it is there already
  uint32_t* arrivals;        // [H_kv / heads_per_arrival]: pieces that have come
};

/// What the kernel is told. Maps of memory: (D, rows, heads, batch).
struct KernelParams {
  CUtensorMap q;      // in boxes of [64, 64]
  CUtensorMap out;    // [64, 64]; only where rows are final
  CUtensorMap state;  // [64, 32]; only where rows are not, or with fold

  TileOrder order;
  int num_segments;
  Bringing bringing;
  BringOrder bring;

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

/// What a kernel for up to kSegments of them is told. One segment alone is there when the launch
/// begins; more may be brought meanwhile.
template <int kSegments>
struct SegmentedParams : KernelParams {
  static constexpr bool kBringing = kSegments > 1;

  struct Maps {
    CUtensorMap k;  // [kBlockK, 64]
    CUtensorMap v;  // [kBlockK, 64]
  } maps[kSegments];
  KeyBounds keys[kSegments];
  BroughtKeys brought[kSegments];

  /// Where turns are handed out: from the first of these on, they are taken in this order
  /// (makespan.h).
  static constexpr int kRoomForTurns = kBringing ? kMostLastTurns : 1;
  int first_last_turn;
  uint16_t last_turns[kRoomForTurns];

  constexpr int reordered(int turn) const {
    return turn < first_last_turn ? turn : first_last_turn + last_turns[turn - first_last_turn];
  }
};

constexpr int kMaxSegments = 16;

/// Whether the current device is of compute capability 9.0: code for sm_90a runs nowhere else.
bool available();

/// Whether this family is for such calls: 16-bit types, kMaxSegments segments at most.
bool supports(const BlockAttentionParams& p);

/// Enqueues p, which must be aligned and supported, on an available device. cudaErrorNotSupported,
/// with nothing enqueued, where the copy engine cannot describe the tensors.
cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// kHeadDim in {64, 128, 256}: the smallest that holds p.head_dim.
template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda::sm90
