// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/params.h"
#include "core/attention_tile.h"
#include "core/ceil_div.h"

// Which tiles of queries are attended together, and in which order all of them are. Plain C++: the
// host decides, the kernel looks up.

namespace ringattn::cuda::sm90 {

/// Keys under one diagonal: KeySegment without its memory.
struct KeyBounds {
  int num_keys;
  int diagonal;
  int first_query;

  /// That rows up to `rows_end` see something of, all of them on the side of `first_query` that
  /// `row` is on.
  constexpr int seen(int row, int rows_end) const {
    const int end = rows_end + diagonal;
    return row < first_query || end < 0 ? 0 : end < num_keys ? end : num_keys;
  }
  /// The same, in tiles of `block_k` keys.
  constexpr int tiles_seen(int row, int rows_end, int block_k) const {
    return (seen(row, rows_end) + block_k - 1) / block_k;
  }
};

/// So many turns at the end, at the most, are taken in an order of their own (tile_cost.h).
constexpr int kMostLastTurns = 1024;

constexpr int kConsumerRows = 64;  // of queries, that a warpgroup attends

/// What a cluster takes in one turn, a tile for each of its thread blocks. All of them want the
/// same keys, which come once: those that the last row sees something of.
struct TurnShape {
  int heads = 1;      // of one KV head: "a bundle"
  int row_tiles = 1;  // of a head, next to each other

  constexpr int blocks() const { return heads * row_tiles; }
};

/// The order in which turns are taken. Queries from `split` on, which see more segments than those
/// before it, come first; no turn has queries of both sides. Both parts go by slices of heads whose
/// keys and values fit L2 together and, unless much is brought, arrive together; within a slice by
/// length, the slice's heads next to each other. The last ones may be cut into parts of fewer rows:
/// their first parts, then their second ones, and so on.
struct TileOrder {
  TurnShape shape;
  int turns;              // of all clusters together, each part by itself
  int whole_turns;        // those before the parts
  int cut_turns;          // so many are
  int part_rows;          // of one that is cut
  int split;              // where the late part begins
  int late_turns;         // from the split on
  int late_row_turns;     // of one bundle, from the split on
  int early_row_turns;    // of one bundle, before the split
  int bundles;            // B * H / shape.heads
  int bundles_per_slice;  // whole groups of H / H_kv heads
  int slices;

  struct Taken {
    int first_row;  // of the tile; not before turn_end: the tile has no rows
    int turn_end;   // of all the turn's rows
    int head;       // of B * H
  };
  /// The tile that thread block `rank` of a cluster takes, of a turn that there is.
  constexpr Taken taken(int turn, int rank, int block_q, int num_queries) const {
    int part = 0;
    for (; turn >= whole_turns + cut_turns; turn -= cut_turns) ++part;
    const bool is_cut = turn >= whole_turns;
    const bool is_late = turn < late_turns;
    const int in_part = is_late ? turn : turn - late_turns;
    const int row_turns = is_late ? late_row_turns : early_row_turns;
    const int slice = in_part / (bundles_per_slice * row_turns);
    const int in_slice = in_part - slice * bundles_per_slice * row_turns;
    const int first_bundle = slice * bundles_per_slice;
    const int left = bundles - first_bundle;
    const int in_row = bundles_per_slice < left ? bundles_per_slice : left;
    const int turns_before = in_slice / in_row;
    // Slices are walked longest tile first, shortest first, and so on; the last one longest first.
    const bool longest_first = (slices - 1 - slice) % 2 == 0;
    const int row_turn = longest_first ? row_turns - 1 - turns_before : turns_before;
    const int bundle = first_bundle + in_slice - turns_before * in_row;
    const int turn_rows = shape.row_tiles * block_q;
    const int whole_begin = (is_late ? split : 0) + row_turn * turn_rows;
    const int turn_begin = whole_begin + part * part_rows;
    int turn_end = is_late ? num_queries : split;
    if (turn_end > whole_begin + turn_rows) turn_end = whole_begin + turn_rows;
    if (is_cut && turn_end > turn_begin + part_rows) turn_end = turn_begin + part_rows;
    const int row_tile = rank / shape.heads;
    return {turn_begin + row_tile * block_q, turn_end,
            bundle * shape.heads + rank - row_tile * shape.heads};
  }
};

/// In so many parts of one size, the last one perhaps smaller: the size.
inline int64_t in_equal_parts(int64_t all, int64_t part) {
  return ceil_div(all, ceil_div(all, part));
}

/// Whether keys are brought while the kernel runs.
inline bool brings(const BlockAttentionParams& p) {
  return std::any_of(p.segments, p.segments + p.num_segments,
                     [](const KeySegment& keys) { return keys.source.data != nullptr; });
}

/// The first row that sees all segments.
inline int split_of(const BlockAttentionParams& p) {
  int split = 0;
  for (int i = 0; i < p.num_segments; ++i) split = std::max(split, p.segments[i].first_query);
  return std::min(split, p.num_queries);
}

/// Tiles of keys that thread blocks walk over for all rows of one head.
inline int64_t tiles_walked(const BlockAttentionParams& p, int row_tiles, int block_q,
                            int block_k) {
  const int split = split_of(p), turn_rows = row_tiles * block_q;
  int64_t walked = 0;
  for (int begin = 0, end; begin < p.num_queries; begin = end) {
    end = begin + std::min(turn_rows, (begin < split ? split : p.num_queries) - begin);
    for (int i = 0; i < p.num_segments; ++i) {
      const KeySegment& keys = p.segments[i];
      const KeyBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query};
      walked += int64_t{row_tiles} * bounds.tiles_seen(begin, end, block_k);
    }
  }
  return walked;
}

/// Whether keys are brought in such numbers that the kernel might wait for them: for every so many
/// tiles of 128 rows and keys that are walked over, one. (At D 128 on 132 SMs, 160 and 96 GB/s.) Of
/// few keys altogether, the first ones are what is waited for.
inline bool brings_much(const BlockAttentionParams& p) {
  constexpr int64_t kWalkedPerBrought = 36, kWalkedPerBroughtOfMany = 60;
  constexpr int64_t kManyBytes = int64_t{64} << 20, kElementBytes = 2;
  constexpr int kTile = 128;
  int64_t brought = 0;  // of a KV head
  for (int i = 0; i < p.num_segments; ++i) {
    if (p.segments[i].source.data != nullptr) brought += ceil_div(p.segments[i].num_keys, kTile);
  }
  const int64_t bytes = brought * kTile * p.head_dim * kElementBytes * 2 * p.num_kv_heads * p.batch;
  const int64_t most_walked =
      brought * (bytes < kManyBytes ? kWalkedPerBrought : kWalkedPerBroughtOfMany);
  return most_walked > tiles_walked(p, 1, kTile, kTile) * (p.num_heads / p.num_kv_heads);
}

/// A tile alone takes one of so many parts longer than one that shares its keys.
constexpr int64_t kAloneCosts = 32;

/// What two thread blocks that share keys and values take: two heads of one KV head, or, where
/// these are odd in number, two row tiles of a head. One tile alone where sharing would not pay.
inline TurnShape shape_of_pairs(const BlockAttentionParams& p, int block_q, int block_k) {
  constexpr int64_t kFewestKeys = 2048;
  int64_t num_keys = 0;
  for (int i = 0; i < p.num_segments; ++i) num_keys += p.segments[i].num_keys;
  if (num_keys < kFewestKeys) return {};
  if (p.num_heads / p.num_kv_heads % 2 == 0) return {2, 1};
  // The tile with the earlier rows walks over keys that only the other one sees, and of an odd
  // number of tiles one has no other. That may cost what sharing saves, and several times that
  // where L2 is busy with keys that are brought.
  const int64_t most_more = brings(p) ? 4 : kAloneCosts;
  const int64_t alone = tiles_walked(p, 1, block_q, block_k);
  const int64_t in_pairs = tiles_walked(p, 2, block_q, block_k);
  return (in_pairs - alone) * most_more <= alone ? TurnShape{1, 2} : TurnShape{};
}

/// Whether all turns walk over all keys.
inline bool all_see_all(const BlockAttentionParams& p, const TileOrder& order, int block_q) {
  const int first_end = std::min(order.shape.row_tiles * block_q, p.num_queries);
  return order.split == 0 &&
         std::all_of(p.segments, p.segments + p.num_segments, [&](const KeySegment& keys) {
           const KeyBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query};
           return bounds.seen(0, first_end) == keys.num_keys;
         });
}

/// Turns that are all equally long leave clusters idle when the last ones are taken, unless they
/// come to whole rounds. Cut, these are done sooner, by all: in parts of as few rows as there are
/// clusters for. Not for all consumers of a part there is something to do, so in the rounds before
/// it would not pay.
inline void cut_last_turns(const BlockAttentionParams& p, int block_q, int blocks,
                           TileOrder& order) {
  const int clusters = blocks / order.shape.blocks(), last = order.turns % clusters;
  if (last == 0 || order.shape.row_tiles > 1 || !all_see_all(p, order, block_q)) return;
  // Turns that rows do not fill, one for each bundle, stay as they are: the first ones of a slice.
  const int last_bundles = order.bundles - (order.slices - 1) * order.bundles_per_slice;
  if (last > last_bundles * (p.num_queries / block_q)) return;
  const int consumers = block_q / kConsumerRows, left_rows = p.num_queries % block_q;
  const int idle = left_rows == 0 ? 0 : (block_q - left_rows) / kConsumerRows;  // in one of these
  for (int active = 1; active < consumers; ++active) {
    const int parts = static_cast<int>(ceil_div(consumers, active));
    // Whole, the last ones would begin earlier by what these save, shared among them; parts end
    // earlier by what they save.
    if (last * parts > clusters || last * (consumers - active) <= order.bundles * idle) continue;
    order.whole_turns = order.turns - last;
    order.cut_turns = last;
    order.part_rows = active * kConsumerRows;
    order.turns = order.whole_turns + last * parts;
    return;
  }
}

/// Slices of equal numbers of KV heads whose keys and values take a third of L2 or less. Where keys
/// are brought: none wider than what the first tiles, of `blocks` thread blocks, are about
/// (`heads_at_once`).
inline TileOrder tile_order(const BlockAttentionParams& p, TurnShape shape, int block_q,
                            int l2_bytes, int blocks, int64_t& heads_at_once) {
  constexpr int kElementBytes = 2;
  int64_t num_keys = 1;
  for (int i = 0; i < p.num_segments; ++i) num_keys += p.segments[i].num_keys;
  const int turn_rows = shape.row_tiles * block_q;
  TileOrder order;
  order.shape = shape;
  order.split = split_of(p);
  order.late_row_turns = static_cast<int>(ceil_div(p.num_queries - order.split, turn_rows));
  order.early_row_turns = static_cast<int>(ceil_div(order.split, turn_rows));

  const int heads_per_kv_head = p.num_heads / p.num_kv_heads;
  heads_at_once = p.num_kv_heads;
  if (brings(p)) {
    const int64_t row_tiles = int64_t{std::max(order.late_row_turns, 1)} * shape.row_tiles;
    const int64_t tiles = row_tiles * heads_per_kv_head * p.batch;  // of a KV head
    heads_at_once = std::clamp<int64_t>((blocks + tiles / 2) / tiles, 1, p.num_kv_heads);
    heads_at_once = in_equal_parts(p.num_kv_heads, heads_at_once);
  }
  const int64_t kv_head_bytes = int64_t{2} * num_keys * p.head_dim * kElementBytes;
  const int64_t fitting =
      std::clamp<int64_t>(l2_bytes / 3 / kv_head_bytes, 1, p.batch * heads_at_once);
  const int64_t kv_heads_per_slice = in_equal_parts(int64_t{p.batch} * p.num_kv_heads, fitting);

  const int bundles_per_kv_head = heads_per_kv_head / shape.heads;
  order.bundles = p.batch * p.num_kv_heads * bundles_per_kv_head;
  order.bundles_per_slice = static_cast<int>(kv_heads_per_slice) * bundles_per_kv_head;
  order.slices = (order.bundles + order.bundles_per_slice - 1) / order.bundles_per_slice;
  order.late_turns = order.late_row_turns * order.bundles;
  order.turns = order.late_turns + order.early_row_turns * order.bundles;
  order.whole_turns = order.turns;
  order.cut_turns = order.part_rows = 0;
  cut_last_turns(p, block_q, blocks, order);
  return order;
}

}  // namespace ringattn::cuda::sm90
