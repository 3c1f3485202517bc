// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/key_bounds.h"
#include "attention/params.h"
#include "core/attention_tile.h"
#include "core/ceil_div.h"

// Which tiles of queries run together, and in which order. Plain C++: the host computes the order,
// the kernel looks it up.

namespace ringattn::cuda::sm90 {

/// The most work tiles that rebalance_tail reorders.
constexpr int kMaxTailTiles = 1024;

constexpr int kConsumerRows = 64;  // query rows of a warpgroup

/// A work tile: what a cluster takes at a time, one query tile for each of its thread blocks. All
/// of them walk over the same keys, those visible to the last row, which are loaded once.
struct WorkTileShape {
  int heads = 1;      // a bundle: heads of one KV head
  int row_tiles = 1;  // adjacent query tiles of a head

  constexpr int blocks() const { return heads * row_tiles; }
};

/// The order of the work tiles. Rows from `split` on ("late"), which see more segments than those
/// before it ("early"), come first; no work tile has rows of both. Both go by groups of heads whose
/// keys and values fit L2 together and, unless the call is fetch-bound, arrive together; within a
/// group by duration, with the group's heads next to each other. The last work tiles may be cut
/// into parts of fewer rows: all first parts, then all second ones, and so on.
struct TileScheduler {
  WorkTileShape shape;
  int num_tiles;        // work tiles of all clusters; each part counts
  int num_whole_tiles;  // before the parts
  int num_cut_tiles;    // cut into parts
  int cut_rows;         // of a part
  int split;            // first late row
  int num_late_tiles;
  int late_tiles_per_bundle;
  int early_tiles_per_bundle;
  int num_bundles;        // B * H / shape.heads
  int bundles_per_group;  // all heads of its KV heads
  int num_groups;

  /// The query tile of one thread block.
  struct Assignment {
    int first_row;      // work_tile_end or more: it has no rows
    int work_tile_end;  // end of the work tile's rows
    int head;           // of B * H
  };
  /// For thread block `rank` of the cluster that takes `work_tile`, in [0, num_tiles).
  constexpr Assignment assignment(int work_tile, int rank, int block_q, int num_queries) const {
    int part = 0;
    for (; work_tile >= num_whole_tiles + num_cut_tiles; work_tile -= num_cut_tiles) ++part;
    const bool is_cut = work_tile >= num_whole_tiles;
    const bool is_late = work_tile < num_late_tiles;
    const int in_half = is_late ? work_tile : work_tile - num_late_tiles;
    const int tiles_per_bundle = is_late ? late_tiles_per_bundle : early_tiles_per_bundle;
    const int group = in_half / (bundles_per_group * tiles_per_bundle);
    const int in_group = in_half - group * bundles_per_group * tiles_per_bundle;
    const int first_bundle = group * bundles_per_group;
    const int left = num_bundles - first_bundle;
    const int in_row = bundles_per_group < left ? bundles_per_group : left;
    const int tiles_before = in_group / in_row;
    // Groups go alternately from the longest tile to the shortest and back; the last one begins
    // with its longest.
    const bool longest_first = (num_groups - 1 - group) % 2 == 0;
    const int bundle_tile = longest_first ? tiles_per_bundle - 1 - tiles_before : tiles_before;
    const int bundle = first_bundle + in_group - tiles_before * in_row;
    const int work_tile_rows = shape.row_tiles * block_q;
    const int whole_begin = (is_late ? split : 0) + bundle_tile * work_tile_rows;
    const int begin = whole_begin + part * cut_rows;
    int end = is_late ? num_queries : split;
    if (end > whole_begin + work_tile_rows) end = whole_begin + work_tile_rows;
    if (is_cut && end > begin + cut_rows) end = begin + cut_rows;
    const int row_tile = rank / shape.heads;
    return {begin + row_tile * block_q, end, bundle * shape.heads + rank - row_tile * shape.heads};
  }
};

/// The size of a part when `all` is divided into equal parts of at most `max_part`; the last one
/// may be smaller.
inline int64_t equal_part(int64_t all, int64_t max_part) {
  return ceil_div(all, ceil_div(all, max_part));
}

/// Whether the kernel fetches keys while it runs.
inline bool has_remote_segments(const BlockAttentionParams& p) {
  return std::any_of(p.segments, p.segments + p.num_segments,
                     [](const KeySegment& keys) { return keys.is_remote(); });
}

/// Whether tables say what rows see.
inline bool has_tables(const BlockAttentionParams& p) {
  return std::any_of(p.segments, p.segments + p.num_segments,
                     [](const KeySegment& keys) { return keys.key_ranges != nullptr; });
}

/// Whether a table in device memory alone, which the host cannot read, says it. Estimates take such
/// a segment for one under the diagonal 0.
inline bool has_unknown_tables(const BlockAttentionParams& p) {
  return std::any_of(p.segments, p.segments + p.num_segments, [](const KeySegment& keys) {
    return keys.key_ranges != nullptr && keys.host_table.ranges == nullptr;
  });
}

/// Whether a launch has what its modes need, and nothing of the modes that it does not have.
inline bool modes_are_valid(const BlockAttentionParams& p) {
  const LaunchScratch& scratch = p.remote_fetch.scratch;
  if ((p.scheduling == Scheduling::kDynamic) != (scratch.data != nullptr)) return false;
  if ((p.fetch == Fetch::kRemote) != (p.remote_fetch.failed != nullptr)) return false;
  if (p.fetch == Fetch::kNone) return !has_remote_segments(p);
  // With static scheduling no thread block would fetch keys or signal the peers.
  return p.scheduling == Scheduling::kDynamic && scratch.num_arrivals >= p.num_segments;
}

/// The first row that sees all segments.
inline int split_of(const BlockAttentionParams& p) {
  int split = 0;
  for (int i = 0; i < p.num_segments; ++i) split = std::max(split, p.segments[i].first_query);
  return std::min(split, p.num_queries);
}

/// Tiles of keys that thread blocks process for all rows of one head.
inline int64_t tiles_walked(const BlockAttentionParams& p, int row_tiles, int block_q,
                            int block_k) {
  const int split = split_of(p), work_tile_rows = row_tiles * block_q;
  int64_t walked = 0;
  for (int begin = 0, end; begin < p.num_queries; begin = end) {
    end = begin + std::min(work_tile_rows, (begin < split ? split : p.num_queries) - begin);
    for (int i = 0; i < p.num_segments; ++i) {
      const KeySegment& keys = p.segments[i];
      const DiagonalBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query};
      walked += int64_t{row_tiles} * bounds.visible_tiles(begin, end, block_k);
    }
  }
  return walked;
}

/// Whether the kernel may wait for fetched keys: one tile of them for at most so many tiles of 128
/// rows and keys that it processes. (At D 128 on 132 SMs, 160 and 96 GB/s.) With few keys in all,
/// only the first ones are waited for.
inline bool is_fetch_bound(const BlockAttentionParams& p) {
  constexpr int64_t kWalkedPerFetched = 36, kWalkedPerFetchedOfMany = 60;
  constexpr int64_t kManyBytes = int64_t{64} << 20, kElementBytes = 2;
  constexpr int kTile = 128;
  int64_t fetched = 0;  // tiles of a KV head
  for (int i = 0; i < p.num_segments; ++i) {
    fetched += ceil_div(p.segments[i].num_fetched(), kTile);
  }
  const int64_t bytes = fetched * kTile * p.head_dim * kElementBytes * 2 * p.num_kv_heads * p.batch;
  const int64_t max_walked =
      fetched * (bytes < kManyBytes ? kWalkedPerFetched : kWalkedPerFetchedOfMany);
  return max_walked > tiles_walked(p, 1, kTile, kTile) * (p.num_heads / p.num_kv_heads);
}

/// A tile alone takes 1 / 32 longer than one of a pair that shares keys.
constexpr int64_t kUnpairedCost = 32;

/// The work tile of two thread blocks that share keys and values: two heads of one KV head or,
/// where their number is odd, two row tiles of a head. A single tile where sharing would not pay.
inline WorkTileShape pair_shape(const BlockAttentionParams& p, int block_q, int block_k) {
  constexpr int64_t kMinKeys = 2048;
  int64_t num_keys = 0;
  for (int i = 0; i < p.num_segments; ++i) num_keys += p.segments[i].num_keys;
  if (num_keys < kMinKeys) return {};
  if (p.num_heads / p.num_kv_heads % 2 == 0) return {2, 1};
  // The tile with the earlier rows processes keys that only the other one sees, and an odd number
  // of tiles leaves one unpaired. That may cost what sharing saves, and several times that where L2
  // is busy with fetched keys.
  const int64_t max_extra = has_remote_segments(p) ? 4 : kUnpairedCost;
  const int64_t alone = tiles_walked(p, 1, block_q, block_k);
  const int64_t in_pairs = tiles_walked(p, 2, block_q, block_k);
  return (in_pairs - alone) * max_extra <= alone ? WorkTileShape{1, 2} : WorkTileShape{};
}

/// Whether all work tiles process all keys.
inline bool all_see_all(const BlockAttentionParams& p, const TileScheduler& scheduler,
                        int block_q) {
  const int first_end = std::min(scheduler.shape.row_tiles * block_q, p.num_queries);
  return scheduler.split == 0 &&
         std::all_of(p.segments, p.segments + p.num_segments, [&](const KeySegment& keys) {
           const DiagonalBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query};
           return bounds.visible(0, first_end) == keys.num_keys;
         });
}

/// Equally long work tiles leave clusters idle in the last round, unless it is a full one. Cut into
/// parts, of as few rows as there are clusters for, the last tiles are done sooner by all clusters.
/// Parts leave consumers idle, so that cutting would not pay in earlier rounds.
inline void cut_tail(const BlockAttentionParams& p, int block_q, int blocks,
                     TileScheduler& scheduler) {
  const int clusters = blocks / scheduler.shape.blocks(), last = scheduler.num_tiles % clusters;
  if (last == 0 || scheduler.shape.row_tiles > 1 || !all_see_all(p, scheduler, block_q)) return;
  // Tiles that rows do not fill, one for each bundle, are not cut: they come first in their group.
  const int last_bundles =
      scheduler.num_bundles - (scheduler.num_groups - 1) * scheduler.bundles_per_group;
  if (last > last_bundles * (p.num_queries / block_q)) return;
  const int consumers = block_q / kConsumerRows, left_rows = p.num_queries % block_q;
  const int idle =
      left_rows == 0 ? 0 : (block_q - left_rows) / kConsumerRows;  // consumers in one of these
  for (int active = 1; active < consumers; ++active) {
    const int parts = static_cast<int>(ceil_div(consumers, active));
    // Whole tiles would start earlier by the share of time that the unfilled ones save; parts end
    // earlier by what cutting saves.
    if (last * parts > clusters || last * (consumers - active) <= scheduler.num_bundles * idle)
      continue;
    scheduler.num_whole_tiles = scheduler.num_tiles - last;
    scheduler.num_cut_tiles = last;
    scheduler.cut_rows = active * kConsumerRows;
    scheduler.num_tiles = scheduler.num_whole_tiles + last * parts;
    return;
  }
}

/// Groups of equal numbers of KV heads whose keys and values take a third of L2 or less. With
/// remote segments, a group has at most the KV heads (`heads_at_once`) that the first tiles of
/// `blocks` thread blocks cover.
inline TileScheduler make_tile_scheduler(const BlockAttentionParams& p, WorkTileShape shape,
                                         int block_q, int l2_bytes, int blocks,
                                         int64_t& heads_at_once) {
  constexpr int kElementBytes = 2;
  int64_t num_keys = 1;
  for (int i = 0; i < p.num_segments; ++i) num_keys += p.segments[i].num_keys;
  const int work_tile_rows = shape.row_tiles * block_q;
  TileScheduler scheduler;
  scheduler.shape = shape;
  scheduler.split = split_of(p);
  scheduler.late_tiles_per_bundle =
      static_cast<int>(ceil_div(p.num_queries - scheduler.split, work_tile_rows));
  scheduler.early_tiles_per_bundle = static_cast<int>(ceil_div(scheduler.split, work_tile_rows));

  const int heads_per_kv_head = p.num_heads / p.num_kv_heads;
  heads_at_once = p.num_kv_heads;
  if (has_remote_segments(p)) {
    const int64_t row_tiles =
        int64_t{std::max(scheduler.late_tiles_per_bundle, 1)} * shape.row_tiles;
    const int64_t tiles = row_tiles * heads_per_kv_head * p.batch;  // of a KV head
    heads_at_once = std::clamp<int64_t>((blocks + tiles / 2) / tiles, 1, p.num_kv_heads);
    heads_at_once = equal_part(p.num_kv_heads, heads_at_once);
  }
  const int64_t kv_head_bytes = int64_t{2} * num_keys * p.head_dim * kElementBytes;
  const int64_t fitting =
      std::clamp<int64_t>(l2_bytes / 3 / kv_head_bytes, 1, p.batch * heads_at_once);
  const int64_t kv_heads_per_group = equal_part(int64_t{p.batch} * p.num_kv_heads, fitting);

  const int bundles_per_kv_head = heads_per_kv_head / shape.heads;
  scheduler.num_bundles = p.batch * p.num_kv_heads * bundles_per_kv_head;
  scheduler.bundles_per_group = static_cast<int>(kv_heads_per_group) * bundles_per_kv_head;
  scheduler.num_groups =
      (scheduler.num_bundles + scheduler.bundles_per_group - 1) / scheduler.bundles_per_group;
  scheduler.num_late_tiles = scheduler.late_tiles_per_bundle * scheduler.num_bundles;
  scheduler.num_tiles =
      scheduler.num_late_tiles + scheduler.early_tiles_per_bundle * scheduler.num_bundles;
  scheduler.num_whole_tiles = scheduler.num_tiles;
  scheduler.num_cut_tiles = scheduler.cut_rows = 0;
  cut_tail(p, block_q, blocks, scheduler);
  return scheduler;
}

}  // namespace ringattn::cuda::sm90
