// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/cuda/sm90/scheduler/makespan.h"
#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "core/attention_tile.h"

// The sizes of tiles, and which of two a call of head dimensions from 65 to 128 takes. Plain C++.
// The choice depends on the shapes and the device, not on where keys come from or on max_blocks, so
// that bits do not depend on these.

namespace ringattn::cuda::sm90 {

constexpr AttentionTile hopper_tile(int rows, int keys, int time) {
  return {rows, keys, kConsumerRows, time, tile_overhead(rows) * keys / 2};
}
constexpr AttentionTile kTile64 = hopper_tile(256, 64, 1);
constexpr AttentionTile kLargeTile = hopper_tile(192, 80, 9);    // 1.20 us, H200
constexpr AttentionTile kSmallTile = hopper_tile(128, 128, 10);  // 1.33 us
constexpr AttentionTile kTile256 = hopper_tile(128, 80, 1);

/// The tiles that a call may take, the fastest first.
inline std::vector<AttentionTile> attention_tiles(int head_dim) {
  if (head_dim <= 64) return {kTile64};
  if (head_dim <= 128) return {kLargeTile, kSmallTile};
  return {kTile256};
}

/// The time of a call in tiles of this size; one unit for all sizes.
inline int64_t time_in_tiles(const BlockAttentionParams& p, const AttentionTile& size, int l2_bytes,
                             int multiprocessors) {
  BlockAttentionParams local = p;  // all keys are local
  std::vector<KeySegment> segments(p.segments, p.segments + p.num_segments);
  for (KeySegment& keys : segments) keys.source = {};
  local.segments = segments.data();
  const WorkTileShape shape =
      multiprocessors % 2 == 0 ? pair_shape(local, size.rows, size.keys) : WorkTileShape{};
  int64_t heads_at_once = 0;
  const TileScheduler scheduler =
      make_tile_scheduler(local, shape, size.rows, l2_bytes, multiprocessors, heads_at_once);
  const std::vector<WorkTile> tiles = timed_work_tiles(local, scheduler, p.num_kv_heads, false,
                                                       size.rows, size.keys, multiprocessors);
  const int64_t clusters = multiprocessors / shape.blocks();
  const auto time_of = [&](const std::vector<WorkTile>& in_order) {
    const int64_t time = size.relative_cost * makespan(in_order, clusters);
    return shape.blocks() > 1 ? time : time + time / kUnpairedCost;
  };
  if (p.num_segments == 1) return time_of(tiles);
  // A ring's launch rebalances the tail.
  const int64_t max_tail = max_tail_tiles(scheduler.num_tiles, clusters);
  return time_of(with_tail_order(tiles, rebalance_tail(tiles, clusters, max_tail)));
}

/// Large tiles take less time for each row. But when there are few, the last ones leave much of the
/// device idle, and more of their rows may be past the end.
inline bool small_tiles_are_faster(const BlockAttentionParams& p, int l2_bytes,
                                   int multiprocessors) {
  return time_in_tiles(p, kSmallTile, l2_bytes, multiprocessors) <
         time_in_tiles(p, kLargeTile, l2_bytes, multiprocessors);
}

/// Whether there are so many large tiles that idle time at the end does not matter.
inline bool has_many_tiles(const BlockAttentionParams& p) {
  constexpr int64_t kManyTiles = 4096;
  return ceil_div(p.num_queries, kLargeTile.rows) * p.batch * p.num_heads > kManyTiles;
}

}  // namespace ringattn::cuda::sm90
