// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/params.h"

// The kernel family for compute capability 9.0 (Hopper): float16 and bfloat16. Kernels are
// instantiated in files of their own (instantiations/).

namespace ringattn::cuda::sm90 {

/// The order in which tiles are taken, one by each thread block of a cluster at a time: those of as
/// many neighbouring heads ("a bundle") with the same rows. Queries from `split` on, which see more
/// segments than those before it, come first. Both parts go by slices of heads whose keys and
/// values fit L2 together and arrive together; within a slice by length, the slice's heads next to
/// each other.
struct TileOrder {
  int turns;              // of all clusters together; in each, one takes the tiles of a bundle
  int split;              // a tile's queries lie on one side of it
  int late_turns;         // from the split on
  int late_row_tiles;     // of one head, from the split on
  int early_row_tiles;    // of one head, before the split
  int bundles;            // B * H / heads_per_bundle
  int heads_per_bundle;   // of one KV head; thread blocks of a cluster
  int bundles_per_slice;  // whole groups of H / H_kv heads
  int slices;

  /// Tiles that one turn takes: these rows of one bundle.
  struct Taken {
    int first_row;
    int rows_end;
    int bundle;
  };
  constexpr Taken taken(int turn, int block_q, int num_queries) const {
    const bool is_late = turn < late_turns;
    const int in_part = is_late ? turn : turn - late_turns;
    const int row_tiles = is_late ? late_row_tiles : early_row_tiles;
    const int slice = in_part / (bundles_per_slice * row_tiles);
    const int in_slice = in_part - slice * bundles_per_slice * row_tiles;
    const int first_bundle = slice * bundles_per_slice;
    const int left = bundles - first_bundle;
    const int in_row = bundles_per_slice < left ? bundles_per_slice : left;
    const int row_of_tiles = in_slice / in_row;
    // Slices are walked longest tile first, shortest first, and so on; the last one longest first.
    const bool longest_first = (slices - 1 - slice) % 2 == 0;
    const int row_tile = longest_first ? row_tiles - 1 - row_of_tiles : row_of_tiles;
    const int first_row = (is_late ? split : 0) + row_tile * block_q;
    const int rows_end = first_row + block_q, part_end = is_late ? num_queries : split;
    return {first_row, rows_end < part_end ? rows_end : part_end,
            first_bundle + in_slice - row_of_tiles * in_row};
  }
};

/// Keys under one diagonal: KeySegment without its memory.
struct KeyBounds {
  int num_keys;
  int diagonal;
  int first_query;

  /// That a tile of queries sees something of, up to its last row.
  constexpr int seen(int first_row, int rows_end) const {
    const int end = rows_end + diagonal;
    return first_row < first_query || end < 0 ? 0 : end < num_keys ? end : num_keys;
  }
};

/// The order in which keys are brought: slices of KV heads, of each all segments that have a
/// source, plane by plane, in pieces (arrivals.cuh). Pieces are counted by segments and heads.
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
  CUtensorMap q;      // in boxes of [kBlockQ, 64]
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
  /// (turn_order.h).
  static constexpr int kMostLastTurns = kBringing ? 1024 : 1;
  int first_last_turn;
  uint16_t last_turns[kMostLastTurns];

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
