// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/cuda/sm90/scheduler/makespan.h"
#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "core/attention_tile.h"

// The sizes of tiles, and which of two a call of head dimensions from 65 to 128 takes. Plain C++:
// by what is attended on which device, not by where keys come from or how many thread blocks there
// may be, so that bits do not depend on these.

namespace ringattn::cuda::sm90 {

constexpr AttentionTile hopper_tile(int rows, int keys, int time) {
  return {rows, keys, kConsumerRows, time, begin_and_end(rows) * keys / 2};
}
constexpr AttentionTile kTile64 = hopper_tile(256, 64, 1);
constexpr AttentionTile kLargeTile = hopper_tile(192, 80, 9);    // 1.20 us, H200
constexpr AttentionTile kSmallTile = hopper_tile(128, 128, 10);  // 1.33 us
constexpr AttentionTile kTile256 = hopper_tile(128, 80, 1);

/// Those that a call may take, the fastest first.
inline std::vector<AttentionTile> attention_tiles(int head_dim) {
  if (head_dim <= 64) return {kTile64};
  if (head_dim <= 128) return {kLargeTile, kSmallTile};
  return {kTile256};
}

/// How long a call takes in tiles of such a size, in the same unit for all.
inline int64_t time_in_tiles(const BlockAttentionParams& p, const AttentionTile& size, int l2_bytes,
                             int multiprocessors) {
  BlockAttentionParams there = p;  // all keys
  std::vector<KeySegment> segments(p.segments, p.segments + p.num_segments);
  for (KeySegment& keys : segments) keys.source = {};
  there.segments = segments.data();
  const TurnShape shape =
      multiprocessors % 2 == 0 ? shape_of_pairs(there, size.rows, size.keys) : TurnShape{};
  int64_t heads_at_once = 0;
  const TileOrder order =
      tile_order(there, shape, size.rows, l2_bytes, multiprocessors, heads_at_once);
  const std::vector<Turn> turns =
      turns_in_order(there, order, p.num_kv_heads, false, size.rows, size.keys, multiprocessors);
  const int64_t clusters = multiprocessors / shape.blocks();
  const auto time_of = [&](const std::vector<Turn>& in_order) {
    const int64_t time = size.time * time_of_turns(in_order, clusters);
    return shape.blocks() > 1 ? time : time + time / kAloneCosts;
  };
  if (p.num_segments == 1) return time_of(turns);
  // Of a ring: turns are put into an order with which they end together, if they can.
  const int64_t most = most_last_turns(order.turns, clusters);
  return time_of(with_last_in_order(turns, order_of_last_turns(turns, clusters, most)));
}

/// Large tiles are faster, row by row. But of few, the last ones leave much of the device idle, and
/// more of their rows may be past the end.
inline bool small_tiles_are_faster(const BlockAttentionParams& p, int l2_bytes,
                                   int multiprocessors) {
  return time_in_tiles(p, kSmallTile, l2_bytes, multiprocessors) <
         time_in_tiles(p, kLargeTile, l2_bytes, multiprocessors);
}

/// Of so many large tiles it does not matter how the last ones end.
inline bool has_many_tiles(const BlockAttentionParams& p) {
  constexpr int64_t kMany = 4096;
  return ceil_div(p.num_queries, kLargeTile.rows) * p.batch * p.num_heads > kMany;
}

}  // namespace ringattn::cuda::sm90
