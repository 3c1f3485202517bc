// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel's work tiles: which query tiles run together, in which order.
#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "catch.h"
#include "geometry.h"

using ringattn::BlockAttentionParams;
using ringattn::KeySegment;
using ringattn::WorkTile;
using ringattn::cuda::sm90::has_tables;
using ringattn::cuda::sm90::has_unknown_tables;
using ringattn::cuda::sm90::is_fetch_bound;
using ringattn::cuda::sm90::make_tile_scheduler;
using ringattn::cuda::sm90::pair_shape;
using ringattn::cuda::sm90::tiles_walked;
using ringattn::cuda::sm90::TileScheduler;
using ringattn::cuda::sm90::timed_work_tiles;
using ringattn::cuda::sm90::WorkTileShape;
using ringattn::testing::call;
using ringattn::testing::kL2Bytes;
using ringattn::testing::kNoMask;
using ringattn::testing::segment;

namespace {

/// By testing each tile of keys: does any of the work tile's rows see any of its keys?
int64_t visible_tiles(const BlockAttentionParams& p, int begin, int end, int block_k) {
  int64_t tiles = 0;
  for (int i = 0; i < p.num_segments; ++i) {
    const KeySegment& keys = p.segments[i];
    for (int key = 0; key < keys.num_keys; key += block_k) {
      bool seen = false;
      for (int row = begin; row < end; ++row) {
        seen |= row >= keys.first_query && key - row <= keys.diagonal;
      }
      tiles += seen;
    }
  }
  return tiles;
}

bool same(const WorkTileShape& a, const WorkTileShape& b) {
  return a.heads == b.heads && a.row_tiles == b.row_tiles;
}

/// A rank in the middle of a zigzag ring over four: rows of two chunks.
std::vector<KeySegment> zigzag(int chunk) {
  return {segment(2 * chunk, 0, 0), segment(chunk, kNoMask, 0), segment(2 * chunk, kNoMask, chunk),
          segment(2 * chunk, kNoMask, chunk), segment(chunk, kNoMask, chunk)};
}

}  // namespace

TEST_CASE("every row of every head is in one work tile, whose rows process the same keys") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 400; ++trial) {
    const int kv_heads = 1 + static_cast<int>(random() % 5);
    const int heads_per_kv_head = 1 + static_cast<int>(random() % 4);
    const int num_heads = kv_heads * heads_per_kv_head;
    const int num_queries = 1 + static_cast<int>(random() % 80);
    const int split = random() % 3 ? static_cast<int>(random() % (num_queries + 1)) : 0;
    const int block_q = 1 + static_cast<int>(random() % 9), block_k = 4;
    const std::vector<KeySegment> segments = {
        segment(static_cast<int>(random() % 90), static_cast<int>(random() % 100) - 60, 0),
        segment(static_cast<int>(random() % 90), kNoMask, split)};
    const BlockAttentionParams p = call(segments, num_queries, num_heads, kv_heads);
    for (const WorkTileShape shape :
         {WorkTileShape{1, 1}, WorkTileShape{2, 1}, WorkTileShape{1, 2}}) {
      if (heads_per_kv_head % shape.heads != 0) continue;
      INFO("trial " << trial << ": " << shape.heads << " heads, " << shape.row_tiles
                    << " row tiles");
      // Of L2, as much as one, two or all heads need.
      const int l2_bytes = static_cast<int>(200000 << random() % 4);
      int64_t heads_at_once = 0;
      const TileScheduler scheduler =
          make_tile_scheduler(p, shape, block_q, l2_bytes, 132, heads_at_once);
      std::vector<int> taken(p.batch * num_heads * num_queries);
      int64_t walked = 0;
      for (int work_tile = 0; work_tile < scheduler.num_tiles; ++work_tile) {
        const TileScheduler::Assignment first =
            scheduler.assignment(work_tile, 0, block_q, num_queries);
        const int begin = first.first_row, end = first.work_tile_end;
        CHECK(begin < end);
        CHECK(end - begin <= shape.row_tiles * block_q);
        CHECK((end <= split || begin >= split));
        walked += shape.row_tiles * visible_tiles(p, begin, end, block_k);
        std::set<std::pair<int, int>> tiles;
        for (int rank = 0; rank < shape.blocks(); ++rank) {
          const TileScheduler::Assignment tile =
              scheduler.assignment(work_tile, rank, block_q, num_queries);
          CHECK(tile.work_tile_end == end);
          CHECK(tile.head / heads_per_kv_head == first.head / heads_per_kv_head);
          CHECK(tiles.emplace(tile.head, tile.first_row).second);
          for (int row = tile.first_row; row < std::min(tile.first_row + block_q, end); ++row) {
            ++taken[tile.head * num_queries + row];
          }
        }
      }
      CHECK(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
      CHECK(walked == tiles_walked(p, shape.row_tiles, block_q, block_k) * scheduler.num_bundles);
    }
  }
}

TEST_CASE("thread blocks share keys as heads of one KV head, otherwise as neighbouring row tiles") {
  const auto shape = [](const std::vector<KeySegment>& segments, int num_queries, int num_heads,
                        int num_kv_heads) {
    return pair_shape(call(segments, num_queries, num_heads, num_kv_heads), 128, 128);
  };
  const WorkTileShape alone, heads{2, 1}, rows{1, 2};
  const auto causal = [](int length) { return std::vector{segment(length, 0, 0)}; };
  for (const int kv_heads : {1, 3, 8}) {
    CHECK(same(shape(causal(16384), 16384, 2 * kv_heads, kv_heads), heads));
    CHECK(same(shape(causal(16384), 16384, 6 * kv_heads, kv_heads), heads));
    CHECK(same(shape(causal(16384), 16384, kv_heads, kv_heads), rows));
    CHECK(same(shape(causal(16384), 16384, 3 * kv_heads, kv_heads), rows));
    // Few keys, few rows.
    CHECK(same(shape(causal(2047), 2047, 2 * kv_heads, kv_heads), alone));
    CHECK(same(shape(causal(2048), 2048, kv_heads, kv_heads), alone));
    CHECK(same(shape({segment(8192, kNoMask, 0)}, 128, kv_heads, kv_heads), alone));
    CHECK(same(shape({segment(8192, kNoMask, 0)}, 256, kv_heads, kv_heads), rows));
    CHECK(same(shape(zigzag(128), 256, kv_heads, kv_heads), alone));
    CHECK(same(shape(zigzag(2048), 4096, kv_heads, kv_heads), rows));
  }
}

TEST_CASE("where keys are fetched, tiles share them that would not share local ones") {
  std::vector<KeySegment> segments = zigzag(640);  // five tiles, of which one is alone
  const BlockAttentionParams p = call(segments, 1280, 3, 3);
  CHECK(same(pair_shape(p, 128, 128), {1, 1}));
  segments.back().source.data = &segments;  // anything
  CHECK(same(pair_shape(p, 128, 128), {1, 2}));
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(p, {1, 2}, 128, kL2Bytes, 132, heads_at_once);
  CHECK(scheduler.late_tiles_per_bundle == 3);
  CHECK(scheduler.num_tiles == 2 * 3 * 3 * 2);  // of two parts, heads, batch entries
}

TEST_CASE("a work tile lasts as long as its visible tiles, and ends after their arrival") {
  // Two row tiles of each part. Late rows see two tiles of the other block's keys and four or five
  // of their own, early rows one or two.
  std::vector<KeySegment> segments = {segment(1024, 0, 0), segment(256, kNoMask, 256)};
  segments[0].num_keys = 512;
  segments[1].source.data = &segments;  // anything
  BlockAttentionParams p = call(segments, 512, 4, 2);
  p.batch = 1;
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(p, {2, 1}, 128, kL2Bytes, 8, heads_at_once);
  REQUIRE(heads_at_once == 2);
  REQUIRE(scheduler.num_tiles == 8);
  const int64_t blocks = 8;
  const std::vector<WorkTile> tiles = timed_work_tiles(p, scheduler, 1, false, 128, 128, blocks);
  std::vector<int> lengths, ends;
  for (const WorkTile& tile : tiles) {
    lengths.push_back(tile.duration);
    ends.push_back(tile.earliest_end);
  }
  CHECK(lengths == std::vector<int>{2 * 6 + 3, 2 * 6 + 3, 2 * 5 + 3, 2 * 5 + 3,  //
                                    2 * 2 + 3, 2 * 2 + 3, 2 * 1 + 3, 2 * 1 + 3});
  // Two tiles, of one head after the other; they remain to be attended when they have arrived.
  const int arrival = 2 * 2 * 24 / blocks, left = 2 * 2 + 3;
  CHECK(ends == std::vector<int>{arrival + left, 2 * arrival + left, arrival + left,
                                 2 * arrival + left, 0, 0, 0, 0});
  // Both heads together, and faster.
  const std::vector<WorkTile> together = timed_work_tiles(p, scheduler, 2, true, 128, 128, blocks);
  CHECK(together[0].earliest_end == 2 * 2 * 20 / blocks + left);
  CHECK(together[1].earliest_end == 2 * (2 * 2 * 20 / blocks) + left);
}

TEST_CASE("work tiles end no earlier than their fetched keys, which arrive one after the other") {
  // Three remote segments of unequal numbers of keys, and a local one.
  std::vector<KeySegment> segments = {segment(384, 0, 0), segment(128, kNoMask, 0),
                                      segment(512, kNoMask, 256), segment(256, kNoMask, 256)};
  for (const int i : {0, 1, 3}) segments[i].source.data = &segments;  // anything
  const BlockAttentionParams p = call(segments, 512, 6, 3);
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(p, {2, 1}, 128, kL2Bytes, 8, heads_at_once);
  const int64_t blocks = 12;
  for (const int heads_per_group : {1, 2, 3}) {
    // By fetching them: tiles that have arrived once a segment of a head has.
    int64_t arrival[4][3] = {}, tiles = 0;
    for (int group = 0; group < 3; group += heads_per_group)
      for (int i = 0; i < 4; ++i)
        for (int head = group; head < std::min(group + heads_per_group, 3); ++head) {
          if (segments[i].source.data == nullptr) continue;
          tiles += p.batch * segments[i].num_keys / 128;
          arrival[i][head] = tiles;
        }
    const std::vector<WorkTile> work_tiles =
        timed_work_tiles(p, scheduler, heads_per_group, false, 128, 128, blocks);
    REQUIRE(work_tiles.size() == static_cast<size_t>(scheduler.num_tiles));
    for (int i = 0; i < scheduler.num_tiles; ++i) {
      INFO(heads_per_group << " heads, work tile " << i);
      const TileScheduler::Assignment assigned = scheduler.assignment(i, 0, 128, 512);
      const int head = assigned.head / 2 / p.batch;
      int64_t length = 3, end = 0;  // by attending them as soon as they arrive
      for (int j = 0; j < 4; ++j) {
        BlockAttentionParams one = p;
        one.segments = &segments[j];
        one.num_segments = 1;
        const int64_t seen =
            2 * visible_tiles(one, assigned.first_row, assigned.work_tile_end, 128);
        length += seen;
        if (seen == 0) continue;
        if (segments[j].source.data != nullptr)
          end = std::max(end, 2 * arrival[j][head] * 24 / blocks);
        if (end > 0) end += seen;
      }
      CHECK(work_tiles[i].duration == length);
      CHECK(work_tiles[i].earliest_end == (end > 0 ? end + 3 : 0));
    }
  }
}

TEST_CASE("under a table that the host knows a work tile lasts as long as its rows' keys") {
  // Two documents, of 320 and 192 rows, whose rows see the keys before them.
  std::vector<int32_t> table;
  for (int row = 0; row < 512; ++row) {
    table.push_back(row < 320 ? 0 : 320);
    table.push_back(row + 1);
  }
  std::vector<KeySegment> segments = {segment(512, 0, 0)};
  segments[0].key_ranges = table.data();
  const BlockAttentionParams p = call(segments, 512, 2, 1);
  CHECK(has_tables(p));
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(p, {2, 1}, 128, kL2Bytes, 8, heads_at_once);
  const auto lengths = [&] {
    std::vector<int> lengths;
    for (const WorkTile& tile : timed_work_tiles(p, scheduler, 1, false, 128, 128, 8)) {
      lengths.push_back(tile.duration);
    }
    return lengths;
  };
  REQUIRE(scheduler.num_tiles == 8);  // of two batch entries
  CHECK(has_unknown_tables(p));
  CHECK(lengths() == std::vector<int>{11, 11, 9, 9, 7, 7, 5, 5});  // as under the diagonal 0
  segments[0].host_table = {table.data(), 1};
  CHECK_FALSE(has_unknown_tables(p));
  // The last rows see keys from 320 on, in two tiles.
  CHECK(lengths() == std::vector<int>{7, 7, 9, 9, 7, 7, 5, 5});
}

TEST_CASE("keys that lie behind those of a remote segment arrive with them") {
  // A block that a rank's early rows see a part of, in two segments; late rows see it all.
  std::vector<KeySegment> apart = {segment(512, 0, 0), segment(384, kNoMask, 0),
                                   segment(128, kNoMask, 256), segment(256, kNoMask, 0)};
  std::vector<KeySegment> whole = {segment(512, 0, 0), segment(512, kNoMask, 256),
                                   segment(256, kNoMask, 0)};
  for (const int i : {1, 3}) apart[i].source.data = &apart;  // anything
  for (const int i : {1, 2}) whole[i].source.data = &whole;
  apart[1].keys_behind = 128;
  CHECK(apart[1].num_fetched() == 512);
  CHECK(apart[2].num_fetched() == 0);
  const BlockAttentionParams a = call(apart, 512, 6, 3), b = call(whole, 512, 6, 3);
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(a, {2, 1}, 128, kL2Bytes, 8, heads_at_once);
  const std::vector<WorkTile> in_two = timed_work_tiles(a, scheduler, 1, false, 128, 128, 12),
                              in_one = timed_work_tiles(b, scheduler, 1, false, 128, 128, 12);
  for (int i = 0; i < scheduler.num_late_tiles; ++i) {
    CHECK(in_two[i].duration == in_one[i].duration);
    CHECK(in_two[i].earliest_end == in_one[i].earliest_end);
  }
  // Early rows wait for all of the block, too, then attend to less of it.
  for (int i = scheduler.num_late_tiles; i < scheduler.num_tiles; ++i) {
    CHECK(in_two[i].earliest_end >= in_one[i].earliest_end);
    CHECK(in_two[i].duration == in_one[i].duration + 2 * 3);
  }
  // Few queries: what is fetched decides.
  apart[1].keys_behind = 1 << 20;
  CHECK(is_fetch_bound(a));
}

TEST_CASE("a tile whose rows need fewer consumers takes less time") {
  std::vector<KeySegment> segments = {segment(800, kNoMask, 0)};
  const auto lengths_of = [&](int num_queries, WorkTileShape shape) {
    const BlockAttentionParams p = call(segments, num_queries, 1, 1);
    int64_t heads_at_once = 0;
    const TileScheduler scheduler = make_tile_scheduler(p, shape, 192, kL2Bytes, 4, heads_at_once);
    std::vector<int> lengths;
    for (const WorkTile& tile : timed_work_tiles(p, scheduler, 1, false, 192, 80, 4))
      lengths.push_back(tile.duration);
    return lengths;
  };
  const int whole = 4 + 2 * 10, of_two = 4 + 2 * 10 * 4 / 5, of_one = 4 + 2 * 10 * 3 / 5;
  // Two batch entries, the last rows of each first.
  CHECK(lengths_of(192 + 192, {}) == std::vector<int>{whole, whole, whole, whole});
  CHECK(lengths_of(192 + 129, {}) == std::vector<int>{whole, whole, whole, whole});
  CHECK(lengths_of(192 + 128, {}) == std::vector<int>{of_two, of_two, whole, whole});
  CHECK(lengths_of(192 + 65, {}) == std::vector<int>{of_two, of_two, whole, whole});
  CHECK(lengths_of(192 + 64, {}) == std::vector<int>{of_one, of_one, whole, whole});
  CHECK(lengths_of(192 + 1, {}) == std::vector<int>{of_one, of_one, whole, whole});
  // Of two row tiles, what the first one takes.
  CHECK(lengths_of(192 + 64, {1, 2}) == std::vector<int>{whole, whole});
}

TEST_CASE("the last of equally long work tiles are cut into parts, one for each cluster") {
  std::vector<KeySegment> segments = {segment(8192, kNoMask, 0)};
  BlockAttentionParams p = call(segments, 8192, 32, 8);
  p.batch = 1;
  const auto scheduler_of = [&](WorkTileShape shape, int block_q, int blocks) {
    int64_t heads_at_once = 0;
    return make_tile_scheduler(p, shape, block_q, kL2Bytes, blocks, heads_at_once);
  };
  // 43 row tiles of 16 pairs of heads: ten rounds of 66, and 28.
  const TileScheduler in_two = scheduler_of({2, 1}, 192, 132);
  CHECK(in_two.num_whole_tiles == 660);
  CHECK(in_two.num_cut_tiles == 28);
  CHECK(in_two.cut_rows == 128);
  CHECK(in_two.num_tiles == 660 + 2 * 28);
  // 29 rounds of 23, and 21.
  const TileScheduler as_they_are = scheduler_of({2, 1}, 192, 46);
  CHECK(as_they_are.num_tiles == 688);
  CHECK(as_they_are.num_whole_tiles == 688);
  // 42 row tiles: ten rounds, and 12.
  p.num_queries = 8064;
  const TileScheduler in_three = scheduler_of({2, 1}, 192, 132);
  CHECK(in_three.cut_rows == 64);
  CHECK(in_three.num_tiles == 660 + 3 * 12);
  // Seven rounds and 2: 16 tiles of 85 rows leave more time than these take.
  p.num_queries = 5461;
  CHECK(scheduler_of({2, 1}, 192, 132).num_tiles == 464);
  CHECK(scheduler_of({2, 1}, 192, 132).num_cut_tiles == 0);
  p.num_queries = 8192;
  // Of which some are longer than others.
  segments[0].diagonal = 8191;
  CHECK(scheduler_of({2, 1}, 192, 132).num_tiles == 660 + 2 * 28);
  segments[0].diagonal = 8192 - 193;
  CHECK(scheduler_of({2, 1}, 192, 132).num_tiles == 688);
  segments[0] = segment(8192, kNoMask, 4096);
  CHECK(scheduler_of({2, 1}, 192, 132).num_cut_tiles == 0);
}

TEST_CASE("parts of work tiles hold every row once, and end sooner than whole ones") {
  std::mt19937 random(2);
  int cut = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const int kv_heads = 1 + static_cast<int>(random() % 4);
    const int num_heads = 2 * kv_heads;
    const int block_q = 128 + static_cast<int>(random() % 3) * 64;
    const int left_rows = random() % 2 ? static_cast<int>(random() % block_q) : 0;
    const int num_queries = block_q * (1 + static_cast<int>(random() % 9)) + left_rows;
    const std::vector<KeySegment> segments = {segment(8000, kNoMask, 0), segment(4800, kNoMask, 0)};
    const BlockAttentionParams p = call(segments, num_queries, num_heads, kv_heads);
    const WorkTileShape shape = {1 + static_cast<int>(random() % 2), 1};
    const int blocks = shape.heads * (1 + static_cast<int>(random() % 40));
    INFO("trial " << trial << ": " << num_queries << " rows in tiles of " << block_q << ", "
                  << blocks << " blocks");
    const int l2_bytes = static_cast<int>(12000000 << random() % 4);
    int64_t heads_at_once = 0;
    const TileScheduler scheduler =
        make_tile_scheduler(p, shape, block_q, l2_bytes, blocks, heads_at_once);
    std::vector<int> taken(p.batch * num_heads * num_queries);
    for (int work_tile = 0; work_tile < scheduler.num_tiles; ++work_tile)
      for (int rank = 0; rank < shape.blocks(); ++rank) {
        const TileScheduler::Assignment tile =
            scheduler.assignment(work_tile, rank, block_q, num_queries);
        CHECK(tile.first_row < tile.work_tile_end);
        for (int row = tile.first_row; row < tile.work_tile_end; ++row)
          ++taken[tile.head * num_queries + row];
      }
    CHECK(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
    if (scheduler.num_cut_tiles == 0) continue;
    ++cut;
    CHECK(scheduler.num_whole_tiles % (blocks / shape.blocks()) == 0);
    CHECK(scheduler.num_tiles - scheduler.num_whole_tiles <= blocks / shape.blocks());
    TileScheduler whole = scheduler;
    whole.num_tiles = whole.num_whole_tiles = scheduler.num_whole_tiles + scheduler.num_cut_tiles;
    const auto time = [&](const TileScheduler& some) {
      return ringattn::makespan(timed_work_tiles(p, some, kv_heads, false, block_q, 80, blocks),
                                blocks / shape.blocks());
    };
    CHECK(time(scheduler) < time(whole));
  }
  CHECK(cut > 50);
}

TEST_CASE("keys arrive at the same time for tiles of any size") {
  std::vector<KeySegment> segments = {segment(128 * 80 * 15, kNoMask, 0)};
  segments[0].source.data = &segments;  // anything
  BlockAttentionParams p = call(segments, 1, 1, 1);
  p.batch = 1;
  const auto arrival = [&](int block_q, int block_k) {
    int64_t heads_at_once = 0;
    const TileScheduler scheduler = make_tile_scheduler(p, {}, block_q, kL2Bytes, 8, heads_at_once);
    const std::vector<WorkTile> tiles =
        timed_work_tiles(p, scheduler, 1, false, block_q, block_k, 8);
    return tiles[0].earliest_end - tiles[0].duration;
  };
  CHECK(arrival(128, 128) == 2 * 80 * 15 * 24 / 8);
  CHECK(arrival(192, 80) == 2 * 128 * 15 * 24 / 8 * 2 / 3);
}

TEST_CASE("a ring is fetch-bound where each KV head has few queries, or many heads do") {
  // Of four. Rank 0's early rows see own keys, its late ones all of the others'; rank 3's see the
  // first half of each other block.
  const auto fetch_bound = [](int rank, int seq_len, int num_kv_heads) {
    const int rows = seq_len / 4;
    std::vector<KeySegment> segments = {segment(rows, 0, 0)};
    for (int i = 0; i < 3; ++i) {
      segments.push_back(rank == 0 ? segment(rows, kNoMask, rows / 2)
                                   : segment(rows / 2, kNoMask, 0));
      segments.back().source = {&segments, rows};
    }
    return is_fetch_bound(call(segments, rows, 32, num_kv_heads));
  };
  CHECK(fetch_bound(0, 16384, 32));
  CHECK(fetch_bound(0, 4096, 8));
  CHECK_FALSE(fetch_bound(0, 8192, 8));
  CHECK_FALSE(fetch_bound(0, 16384, 8));
  CHECK(fetch_bound(0, 32768, 32));
  CHECK_FALSE(fetch_bound(0, 65536, 32));
  CHECK(fetch_bound(3, 16384, 32));
  CHECK_FALSE(fetch_bound(3, 32768, 32));
  CHECK_FALSE(is_fetch_bound(call({segment(2048, 0, 0)}, 2048, 32, 32)));  // nothing at all

  // Rank 0 over 32768 again, with fewer heads: of 12 MiB for each of them and batch entry, 64 are
  // many.
  const auto many = [](int num_heads, int batch) {
    std::vector<KeySegment> segments = {segment(8192, 0, 0)};
    for (int i = 0; i < 3; ++i) {
      segments.push_back(segment(8192, kNoMask, 4096));
      segments.back().source.data = &segments;  // anything
    }
    BlockAttentionParams p = call(segments, 8192, num_heads, num_heads);
    p.batch = batch;
    return is_fetch_bound(p);
  };
  CHECK_FALSE(many(2, 2));
  CHECK(many(3, 2));
  CHECK_FALSE(many(3, 1));
  CHECK(many(6, 1));
}

TEST_CASE("estimates read no table: it is in the memory of the device") {
  std::vector<KeySegment> segments = {segment(4000, 0, 0), segment(300, 0, 0)};
  for (KeySegment& keys : segments) keys.key_ranges = reinterpret_cast<const int32_t*>(8);
  const BlockAttentionParams p = call(segments, 5000, 6, 2);
  CHECK(p.is_general());
  const WorkTileShape shape = pair_shape(p, 128, 128);
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(p, shape, 128, kL2Bytes, 132, heads_at_once);
  CHECK(timed_work_tiles(p, scheduler, 2, is_fetch_bound(p), 128, 128, 132).size() ==
        static_cast<size_t>(scheduler.num_tiles));
  CHECK(tiles_walked(p, 1, 128, 128) > 0);
}
