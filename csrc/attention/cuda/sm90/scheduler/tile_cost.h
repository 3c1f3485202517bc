// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/cuda/sm90/scheduler/makespan.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"

// How long turns are, and how early they can end. Plain C++.

namespace ringattn::cuda::sm90 {

/// In halves of the time of a tile of block_q rows and its keys. (2 us, H200.)
constexpr int begin_and_end(int block_q) { return block_q > 128 ? 4 : 3; }

/// Turns as they lie in `order`, in halves of the time that a tile of block_q rows takes with
/// block_k keys; one of fewer rows, for which not all consumers have something to do, takes less.
/// Keys come in slices of `heads_per_slice` KV heads, of each all segments that are brought;
/// `much`: brings_much.
inline std::vector<Turn> turns_in_order(const BlockAttentionParams& p, const TileOrder& order,
                                        int64_t heads_per_slice, bool much, int block_q,
                                        int block_k, int64_t blocks) {
  // Rows attended to a key by all blocks while one is brought: at D 128 on 132 SMs, 290 and 240
  // GB/s.
  const int64_t rows_per_brought = much ? 2560 : 3072;
  const int consumers = block_q / kConsumerRows;
  const auto is_brought = [&](int i) { return p.segments[i].source.data != nullptr; };
  const auto arrival = [&](int segment, int64_t kv_head) {
    const int64_t slice_begin = kv_head / heads_per_slice * heads_per_slice;
    const int64_t heads = std::min(heads_per_slice, p.num_kv_heads - slice_begin);
    int64_t keys = 0;  // brought by then
    for (int i = 0; i < p.num_segments; ++i) {
      if (!is_brought(i)) continue;
      const int64_t of_slice = i < segment ? heads : i == segment ? kv_head + 1 - slice_begin : 0;
      keys += p.segments[i].num_keys * (slice_begin + of_slice);
    }
    return 2 * keys * p.batch * rows_per_brought / (int64_t{block_q} * block_k * blocks);
  };

  std::vector<Turn> turns;
  turns.reserve(order.turns);
  for (int i = 0; i < order.turns; ++i) {
    const TileOrder::Taken taken = order.taken(i, 0, block_q, p.num_queries);
    const int64_t kv_head = taken.head / (p.num_heads / p.num_kv_heads) / p.batch;
    const int rows = std::min(block_q, taken.turn_end - taken.first_row);
    const int active = (rows + kConsumerRows - 1) / kConsumerRows;
    Turn turn = {begin_and_end(block_q)};
    // From the last segment on: what is left when it has come.
    for (int segment = p.num_segments - 1; segment >= 0; --segment) {
      const KeySegment& keys = p.segments[segment];
      const KeyBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query};
      const int tiles = bounds.tiles_seen(taken.first_row, taken.turn_end, block_k);
      if (tiles == 0) continue;
      turn.length += 2 * tiles * time_of_parts(active) / time_of_parts(consumers);
      if (!is_brought(segment)) continue;
      const int64_t end = arrival(segment, kv_head) + turn.length;
      turn.earliest_end =
          std::max(turn.earliest_end, static_cast<int>(std::min<int64_t>(end, INT32_MAX)));
    }
    turns.push_back(turn);
  }
  return turns;
}

/// How many turns at the end may change places. First come as many as are taken at one time, as
/// they lie. Of many turns most do: those taken at one time are about the same heads, whose keys L2
/// holds.
inline int64_t most_last_turns(int64_t turns, int64_t clusters) {
  constexpr int64_t kLastOfEach = 8;
  return std::max<int64_t>(
      std::min({int64_t{kMostLastTurns}, kLastOfEach * clusters, turns - clusters}), 0);
}

}  // namespace ringattn::cuda::sm90
