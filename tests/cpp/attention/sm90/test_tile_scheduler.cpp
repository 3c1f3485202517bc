// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel's tiles of queries: which are attended together, in which order.
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
using ringattn::Turn;
using ringattn::cuda::sm90::brings_much;
using ringattn::cuda::sm90::shape_of_pairs;
using ringattn::cuda::sm90::tile_order;
using ringattn::cuda::sm90::TileOrder;
using ringattn::cuda::sm90::tiles_walked;
using ringattn::cuda::sm90::turns_in_order;
using ringattn::cuda::sm90::TurnShape;
using ringattn::testing::call;
using ringattn::testing::kL2Bytes;
using ringattn::testing::kNoMask;
using ringattn::testing::segment;

namespace {

/// By looking at each tile of keys: does any of the turn's rows see any of it?
int64_t tiles_seen(const BlockAttentionParams& p, int begin, int end, int block_k) {
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

bool same(const TurnShape& a, const TurnShape& b) {
  return a.heads == b.heads && a.row_tiles == b.row_tiles;
}

/// A rank in the middle of a zigzag ring over four: rows of two chunks.
std::vector<KeySegment> zigzag(int chunk) {
  return {segment(2 * chunk, 0, 0), segment(chunk, kNoMask, 0), segment(2 * chunk, kNoMask, chunk),
          segment(2 * chunk, kNoMask, chunk), segment(chunk, kNoMask, chunk)};
}

}  // namespace

TEST_CASE("every row of every head is taken once, by turns that walk over the same keys") {
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
    for (const TurnShape shape : {TurnShape{1, 1}, TurnShape{2, 1}, TurnShape{1, 2}}) {
      if (heads_per_kv_head % shape.heads != 0) continue;
      INFO("trial " << trial << ": " << shape.heads << " heads, " << shape.row_tiles
                    << " row tiles");
      // Of L2, as much as one, two or all heads need.
      const int l2_bytes = static_cast<int>(200000 << random() % 4);
      int64_t heads_at_once = 0;
      const TileOrder order = tile_order(p, shape, block_q, l2_bytes, 132, heads_at_once);
      std::vector<int> taken(p.batch * num_heads * num_queries);
      int64_t walked = 0;
      for (int turn = 0; turn < order.turns; ++turn) {
        const TileOrder::Taken first = order.taken(turn, 0, block_q, num_queries);
        const int begin = first.first_row, end = first.turn_end;
        CHECK(begin < end);
        CHECK(end - begin <= shape.row_tiles * block_q);
        CHECK((end <= split || begin >= split));
        walked += shape.row_tiles * tiles_seen(p, begin, end, block_k);
        std::set<std::pair<int, int>> tiles;
        for (int rank = 0; rank < shape.blocks(); ++rank) {
          const TileOrder::Taken tile = order.taken(turn, rank, block_q, num_queries);
          CHECK(tile.turn_end == end);
          CHECK(tile.head / heads_per_kv_head == first.head / heads_per_kv_head);
          CHECK(tiles.emplace(tile.head, tile.first_row).second);
          for (int row = tile.first_row; row < std::min(tile.first_row + block_q, end); ++row) {
            ++taken[tile.head * num_queries + row];
          }
        }
      }
      CHECK(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
      CHECK(walked == tiles_walked(p, shape.row_tiles, block_q, block_k) * order.bundles);
    }
  }
}

TEST_CASE("thread blocks share keys as heads of one KV head, otherwise as neighbouring row tiles") {
  const auto shape = [](const std::vector<KeySegment>& segments, int num_queries, int num_heads,
                        int num_kv_heads) {
    return shape_of_pairs(call(segments, num_queries, num_heads, num_kv_heads), 128, 128);
  };
  const TurnShape alone, heads{2, 1}, rows{1, 2};
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

TEST_CASE("where keys are brought, tiles share them that otherwise would not") {
  std::vector<KeySegment> segments = zigzag(640);  // five tiles, of which one is alone
  const BlockAttentionParams p = call(segments, 1280, 3, 3);
  CHECK(same(shape_of_pairs(p, 128, 128), {1, 1}));
  segments.back().source.data = &segments;  // anything
  CHECK(same(shape_of_pairs(p, 128, 128), {1, 2}));
  int64_t heads_at_once = 0;
  const TileOrder order = tile_order(p, {1, 2}, 128, kL2Bytes, 132, heads_at_once);
  CHECK(order.late_row_turns == 3);
  CHECK(order.turns == 2 * 3 * 3 * 2);  // of two parts, heads, batch entries
}

TEST_CASE("turns are as long as what they see, and end when it has come") {
  // Two row tiles of each part. Late rows see two tiles of the other block's keys and four or five
  // of their own, early rows one or two.
  std::vector<KeySegment> segments = {segment(1024, 0, 0), segment(256, kNoMask, 256)};
  segments[0].num_keys = 512;
  segments[1].source.data = &segments;  // anything
  BlockAttentionParams p = call(segments, 512, 4, 2);
  p.batch = 1;
  int64_t heads_at_once = 0;
  const TileOrder order = tile_order(p, {2, 1}, 128, kL2Bytes, 8, heads_at_once);
  REQUIRE(heads_at_once == 2);
  REQUIRE(order.turns == 8);
  const int64_t blocks = 8;
  const std::vector<Turn> turns = turns_in_order(p, order, 1, false, 128, 128, blocks);
  std::vector<int> lengths, ends;
  for (const Turn& turn : turns) {
    lengths.push_back(turn.length);
    ends.push_back(turn.earliest_end);
  }
  CHECK(lengths == std::vector<int>{2 * 6 + 3, 2 * 6 + 3, 2 * 5 + 3, 2 * 5 + 3,  //
                                    2 * 2 + 3, 2 * 2 + 3, 2 * 1 + 3, 2 * 1 + 3});
  // Two tiles, of one head after the other; when they have come, they are left to see.
  const int arrival = 2 * 2 * 24 / blocks, left = 2 * 2 + 3;
  CHECK(ends == std::vector<int>{arrival + left, 2 * arrival + left, arrival + left,
                                 2 * arrival + left, 0, 0, 0, 0});
  // Both heads together, and faster.
  const std::vector<Turn> together = turns_in_order(p, order, 2, true, 128, 128, blocks);
  CHECK(together[0].earliest_end == 2 * 2 * 20 / blocks + left);
  CHECK(together[1].earliest_end == 2 * (2 * 2 * 20 / blocks) + left);
}

TEST_CASE(
    "turns end no earlier than what they see of brought keys, which come one after the other") {
  // Three segments that are brought, of unequal numbers of keys, and one that is there.
  std::vector<KeySegment> segments = {segment(384, 0, 0), segment(128, kNoMask, 0),
                                      segment(512, kNoMask, 256), segment(256, kNoMask, 256)};
  for (const int i : {0, 1, 3}) segments[i].source.data = &segments;  // anything
  const BlockAttentionParams p = call(segments, 512, 6, 3);
  int64_t heads_at_once = 0;
  const TileOrder order = tile_order(p, {2, 1}, 128, kL2Bytes, 8, heads_at_once);
  const int64_t blocks = 12;
  for (const int heads_per_slice : {1, 2, 3}) {
    // By bringing them: what has come when a segment of a head is there, in tiles.
    int64_t come[4][3] = {}, tiles = 0;
    for (int slice = 0; slice < 3; slice += heads_per_slice)
      for (int i = 0; i < 4; ++i)
        for (int head = slice; head < std::min(slice + heads_per_slice, 3); ++head) {
          if (segments[i].source.data == nullptr) continue;
          tiles += p.batch * segments[i].num_keys / 128;
          come[i][head] = tiles;
        }
    const std::vector<Turn> turns =
        turns_in_order(p, order, heads_per_slice, false, 128, 128, blocks);
    REQUIRE(turns.size() == static_cast<size_t>(order.turns));
    for (int i = 0; i < order.turns; ++i) {
      INFO(heads_per_slice << " heads, turn " << i);
      const TileOrder::Taken taken = order.taken(i, 0, 128, 512);
      const int head = taken.head / 2 / p.batch;
      int64_t length = 3, end = 0;  // by attending them, as soon as they are there
      for (int j = 0; j < 4; ++j) {
        BlockAttentionParams one = p;
        one.segments = &segments[j];
        one.num_segments = 1;
        const int64_t seen = 2 * tiles_seen(one, taken.first_row, taken.turn_end, 128);
        length += seen;
        if (seen == 0) continue;
        if (segments[j].source.data != nullptr)
          end = std::max(end, 2 * come[j][head] * 24 / blocks);
        if (end > 0) end += seen;
      }
      CHECK(turns[i].length == length);
      CHECK(turns[i].earliest_end == (end > 0 ? end + 3 : 0));
    }
  }
}

TEST_CASE("a tile for whose rows fewer consumers are needed takes less time") {
  std::vector<KeySegment> segments = {segment(800, kNoMask, 0)};
  const auto lengths_of = [&](int num_queries, TurnShape shape) {
    const BlockAttentionParams p = call(segments, num_queries, 1, 1);
    int64_t heads_at_once = 0;
    const TileOrder order = tile_order(p, shape, 192, kL2Bytes, 4, heads_at_once);
    std::vector<int> lengths;
    for (const Turn& turn : turns_in_order(p, order, 1, false, 192, 80, 4))
      lengths.push_back(turn.length);
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

TEST_CASE("the last of equally long turns are cut into parts, of which each cluster has one") {
  std::vector<KeySegment> segments = {segment(8192, kNoMask, 0)};
  BlockAttentionParams p = call(segments, 8192, 32, 8);
  p.batch = 1;
  const auto order_of = [&](TurnShape shape, int block_q, int blocks) {
    int64_t heads_at_once = 0;
    return tile_order(p, shape, block_q, kL2Bytes, blocks, heads_at_once);
  };
  // 43 row tiles of 16 pairs of heads: ten rounds of 66, and 28.
  const TileOrder in_two = order_of({2, 1}, 192, 132);
  CHECK(in_two.whole_turns == 660);
  CHECK(in_two.cut_turns == 28);
  CHECK(in_two.part_rows == 128);
  CHECK(in_two.turns == 660 + 2 * 28);
  // 29 rounds of 23, and 21.
  const TileOrder as_they_are = order_of({2, 1}, 192, 46);
  CHECK(as_they_are.turns == 688);
  CHECK(as_they_are.whole_turns == 688);
  // 42 row tiles: ten rounds, and 12.
  p.num_queries = 8064;
  const TileOrder in_three = order_of({2, 1}, 192, 132);
  CHECK(in_three.part_rows == 64);
  CHECK(in_three.turns == 660 + 3 * 12);
  // Seven rounds and 2: 16 tiles of 85 rows leave more time than these take.
  p.num_queries = 5461;
  CHECK(order_of({2, 1}, 192, 132).turns == 464);
  CHECK(order_of({2, 1}, 192, 132).cut_turns == 0);
  p.num_queries = 8192;
  // Of which some are longer than others.
  segments[0].diagonal = 8191;
  CHECK(order_of({2, 1}, 192, 132).turns == 660 + 2 * 28);
  segments[0].diagonal = 8192 - 193;
  CHECK(order_of({2, 1}, 192, 132).turns == 688);
  segments[0] = segment(8192, kNoMask, 4096);
  CHECK(order_of({2, 1}, 192, 132).cut_turns == 0);
}

TEST_CASE("parts of turns take every row once, and end sooner than whole ones") {
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
    const TurnShape shape = {1 + static_cast<int>(random() % 2), 1};
    const int blocks = shape.heads * (1 + static_cast<int>(random() % 40));
    INFO("trial " << trial << ": " << num_queries << " rows in tiles of " << block_q << ", "
                  << blocks << " blocks");
    const int l2_bytes = static_cast<int>(12000000 << random() % 4);
    int64_t heads_at_once = 0;
    const TileOrder order = tile_order(p, shape, block_q, l2_bytes, blocks, heads_at_once);
    std::vector<int> taken(p.batch * num_heads * num_queries);
    for (int turn = 0; turn < order.turns; ++turn)
      for (int rank = 0; rank < shape.blocks(); ++rank) {
        const TileOrder::Taken tile = order.taken(turn, rank, block_q, num_queries);
        CHECK(tile.first_row < tile.turn_end);
        for (int row = tile.first_row; row < tile.turn_end; ++row)
          ++taken[tile.head * num_queries + row];
      }
    CHECK(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
    if (order.cut_turns == 0) continue;
    ++cut;
    CHECK(order.whole_turns % (blocks / shape.blocks()) == 0);
    CHECK(order.turns - order.whole_turns <= blocks / shape.blocks());
    TileOrder whole = order;
    whole.turns = whole.whole_turns = order.whole_turns + order.cut_turns;
    const auto time = [&](const TileOrder& some) {
      return ringattn::time_of_turns(turns_in_order(p, some, kv_heads, false, block_q, 80, blocks),
                                     blocks / shape.blocks());
    };
    CHECK(time(order) < time(whole));
  }
  CHECK(cut > 50);
}

TEST_CASE("keys come as fast whatever the size of the tiles that wait for them") {
  std::vector<KeySegment> segments = {segment(128 * 80 * 15, kNoMask, 0)};
  segments[0].source.data = &segments;  // anything
  BlockAttentionParams p = call(segments, 1, 1, 1);
  p.batch = 1;
  const auto arrival = [&](int block_q, int block_k) {
    int64_t heads_at_once = 0;
    const TileOrder order = tile_order(p, {}, block_q, kL2Bytes, 8, heads_at_once);
    const std::vector<Turn> turns = turns_in_order(p, order, 1, false, block_q, block_k, 8);
    return turns[0].earliest_end - turns[0].length;
  };
  CHECK(arrival(128, 128) == 2 * 80 * 15 * 24 / 8);
  CHECK(arrival(192, 80) == 2 * 128 * 15 * 24 / 8 * 2 / 3);
}

TEST_CASE("a ring brings much where each KV head has few queries, or many heads do") {
  // Of four. Rank 0's early rows see own keys, its late ones all of the others'; rank 3's see the
  // first half of each other block.
  const auto much = [](int rank, int seq_len, int num_kv_heads) {
    const int rows = seq_len / 4;
    std::vector<KeySegment> segments = {segment(rows, 0, 0)};
    for (int i = 0; i < 3; ++i) {
      segments.push_back(rank == 0 ? segment(rows, kNoMask, rows / 2)
                                   : segment(rows / 2, kNoMask, 0));
      segments.back().source = {&segments, rows};
    }
    return brings_much(call(segments, rows, 32, num_kv_heads));
  };
  CHECK(much(0, 16384, 32));
  CHECK(much(0, 4096, 8));
  CHECK_FALSE(much(0, 8192, 8));
  CHECK_FALSE(much(0, 16384, 8));
  CHECK(much(0, 32768, 32));
  CHECK_FALSE(much(0, 65536, 32));
  CHECK(much(3, 16384, 32));
  CHECK_FALSE(much(3, 32768, 32));
  CHECK_FALSE(brings_much(call({segment(2048, 0, 0)}, 2048, 32, 32)));  // nothing at all

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
    return brings_much(p);
  };
  CHECK_FALSE(many(2, 2));
  CHECK(many(3, 2));
  CHECK_FALSE(many(3, 1));
  CHECK(many(6, 1));
}
