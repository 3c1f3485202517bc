// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/cuda/sm90/scheduler/makespan.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"

// Durations of work tiles, and how early they can end. Plain C++.

namespace ringattn::cuda::sm90 {

/// Prologue and epilogue of a query tile, in halves of the time it takes with one tile of keys. (2
/// us, H200.)
constexpr int tile_overhead(int block_q) { return block_q > 128 ? 4 : 3; }

/// A segment's tiles of keys that rows [first_row, rows_end) see. Of a table that the host does not
/// know: as if it were under the diagonal 0. Counted from key 0, so with up to a tile more than a
/// kernel of a single segment walks.
inline int visible_tiles(const KeySegment& keys, int first_row, int rows_end, int block_k) {
  if (keys.host_table.ranges != nullptr) {
    const auto* ranges = reinterpret_cast<const KeyRange*>(keys.host_table.ranges);
    const KeyBounds bounds = {keys.num_keys, 0, 0, ranges};
    return KeyTiles::of(bounds.visible(first_row, rows_end), block_k).size();
  }
  const DiagonalBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query};
  return bounds.visible_tiles(first_row, rows_end, block_k);
}

/// The work tiles in the scheduler's order, in halves of the time that block_q rows take with
/// block_k keys; fewer rows, which leave consumers idle, take less. Keys are fetched by groups of
/// `heads_per_group` KV heads, for each group all remote segments.
inline std::vector<WorkTile> timed_work_tiles(const BlockAttentionParams& p,
                                              const TileScheduler& scheduler,
                                              int64_t heads_per_group, bool fetch_bound,
                                              int block_q, int block_k, int64_t blocks) {
  // Rows that all thread blocks attend to a key while one key is fetched: at D 128 on 132 SMs, 290
  // and 240 GB/s.
  const int64_t rows_per_fetched_key = fetch_bound ? 2560 : 3072;
  const int consumers = block_q / kConsumerRows;
  const auto arrival = [&](int segment, int64_t kv_head) {
    const int64_t group_begin = kv_head / heads_per_group * heads_per_group;
    const int64_t heads = std::min(heads_per_group, p.num_kv_heads - group_begin);
    int64_t keys = 0;  // fetched before
    for (int i = 0; i < p.num_segments; ++i) {
      const int64_t of_group = i < segment ? heads : i == segment ? kv_head + 1 - group_begin : 0;
      keys += p.segments[i].num_fetched() * (group_begin + of_group);
    }
    return 2 * keys * p.batch * rows_per_fetched_key / (int64_t{block_q} * block_k * blocks);
  };

  std::vector<WorkTile> tiles;
  tiles.reserve(scheduler.num_tiles);
  for (int i = 0; i < scheduler.num_tiles; ++i) {
    const TileScheduler::Assignment assigned = scheduler.assignment(i, 0, block_q, p.num_queries);
    const int64_t kv_head = assigned.head / (p.num_heads / p.num_kv_heads) / p.batch;
    const int rows = std::min(block_q, assigned.work_tile_end - assigned.first_row);
    const int active = (rows + kConsumerRows - 1) / kConsumerRows;
    WorkTile tile = {tile_overhead(block_q)};
    // From the last segment back: the duration is what remains to be done once the segment is
    // there.
    for (int segment = p.num_segments - 1; segment >= 0; --segment) {
      const KeySegment& keys = p.segments[segment];
      const int key_tiles =
          visible_tiles(keys, assigned.first_row, assigned.work_tile_end, block_k);
      if (key_tiles == 0) continue;
      tile.duration += 2 * key_tiles * warpgroups_cost(active) / warpgroups_cost(consumers);
      if (!keys.is_remote()) continue;
      const int64_t end = arrival(segment, kv_head) + tile.duration;
      tile.earliest_end =
          std::max(tile.earliest_end, static_cast<int>(std::min<int64_t>(end, INT32_MAX)));
    }
    tiles.push_back(tile);
  }
  return tiles;
}

/// How many work tiles at the end rebalance_tail may reorder: not those that clusters take first,
/// and of many tiles only the last. Tiles that run at the same time share heads, whose keys L2
/// holds.
inline int64_t max_tail_tiles(int64_t num_tiles, int64_t clusters) {
  constexpr int64_t kTailTilesPerCluster = 8;
  return std::max<int64_t>(
      std::min({int64_t{kMaxTailTiles}, kTailTilesPerCluster * clusters, num_tiles - clusters}), 0);
}

}  // namespace ringattn::cuda::sm90
