// SPDX-License-Identifier: Apache-2.0
// Which of two sizes of tiles a call takes.
#include <cstdint>
#include <vector>

#include "attention/cuda/sm90/scheduler/tile_selection.h"
#include "catch.h"
#include "geometry.h"

using ringattn::BlockAttentionParams;
using ringattn::KeySegment;
using ringattn::WorkTile;
using ringattn::cuda::sm90::has_many_tiles;
using ringattn::cuda::sm90::kLargeTile;
using ringattn::cuda::sm90::kSmallTile;
using ringattn::cuda::sm90::kUnpairedCost;
using ringattn::cuda::sm90::make_tile_scheduler;
using ringattn::cuda::sm90::small_tiles_are_faster;
using ringattn::cuda::sm90::TileScheduler;
using ringattn::cuda::sm90::time_in_tiles;
using ringattn::cuda::sm90::timed_work_tiles;
using ringattn::cuda::sm90::WorkTileShape;
using ringattn::testing::call;
using ringattn::testing::kL2Bytes;
using ringattn::testing::kNoMask;
using ringattn::testing::segment;

TEST_CASE("a call's time is that of its work tiles, a ring's that of rebalanced ones") {
  const auto time = [](const std::vector<KeySegment>& segments, int num_heads, int num_kv_heads,
                       int multiprocessors) {
    BlockAttentionParams p = call(segments, 128, num_heads, num_kv_heads);
    p.batch = 1;
    return time_in_tiles(p, kSmallTile, kL2Bytes, multiprocessors);
  };
  const std::vector<KeySegment> one = {segment(2048, kNoMask, 0)};
  const std::vector<KeySegment> two = {segment(1024, kNoMask, 0), segment(1024, kNoMask, 0)};
  const int64_t tile = 2 * 16 + 3, unit = kSmallTile.relative_cost;
  const auto alone = [](int64_t time) { return time + time / kUnpairedCost; };
  CHECK(time(one, 4, 4, 2) == alone(2 * tile * unit));
  CHECK(time(two, 4, 4, 2) == alone(2 * tile * unit));
  CHECK(time(two, 1, 1, 1) == alone(tile * unit));
  // The last of three is cut in two, of a consumer each.
  const int64_t part = 2 * 16 * 3 / 4 + 3;
  CHECK(time(one, 3, 3, 2) == alone((tile + part) * unit));
  CHECK(time(two, 3, 3, 2) == alone((tile + part) * unit));
  // Heads in pairs, where multiprocessors are even in number.
  CHECK(time(one, 10, 5, 6) == 2 * tile * unit);
  CHECK(time(one, 10, 5, 5) == alone(2 * tile * unit));  // in pairs on two clusters, three times
}

TEST_CASE("a ring's work tiles end sooner once their tail is rebalanced") {
  // The last of two ranks: 16384 tokens, of the other block all rows see the first half.
  const std::vector<KeySegment> segments = {segment(8192, 0, 0), segment(4096, kNoMask, 0)};
  BlockAttentionParams p = call(segments, 8192, 32, 8);
  p.batch = 1;
  const WorkTileShape pairs = {2, 1};
  int64_t heads_at_once = 0;
  const TileScheduler scheduler = make_tile_scheduler(p, pairs, 192, kL2Bytes, 132, heads_at_once);
  const std::vector<WorkTile> tiles = timed_work_tiles(p, scheduler, 8, false, 192, 80, 132);
  int64_t sum = 0;
  for (const WorkTile& tile : tiles) sum += tile.duration;
  const int64_t even = sum / 66, natural = ringattn::makespan(tiles, 66);
  const int64_t in_order = time_in_tiles(p, kLargeTile, kL2Bytes, 132) / kLargeTile.relative_cost;
  CHECK(natural > even + even / 50);
  CHECK(in_order < even + even / 200);
}

TEST_CASE("tiles are many by the rows of all heads and batch entries") {
  const std::vector<KeySegment> segments = {segment(8192, kNoMask, 0)};
  const auto many = [&](int num_queries, int num_heads, int batch) {
    BlockAttentionParams p = call(segments, num_queries, num_heads, 1);
    p.batch = batch;
    return has_many_tiles(p);
  };
  CHECK_FALSE(many(64 * 192, 32, 2));
  CHECK(many(64 * 192 + 1, 32, 2));
  CHECK(many(64 * 192, 33, 2));
  CHECK(many(64 * 192, 32, 3));
  CHECK_FALSE(many(1, 64, 64));
  CHECK(many(193, 64, 64));
}

TEST_CASE("calls take small tiles where large ones would leave much of the device idle") {
  // One after the other, on 132 multiprocessors: 704 large tiles in six rounds that take 9/10
  // as long for 80 keys as the 1024 small ones' eight rounds do for 128.
  const auto small = [](int seq_len, bool causal) {
    std::vector<KeySegment> segments = {segment(seq_len, causal ? 0 : kNoMask, 0)};
    BlockAttentionParams p = call(segments, seq_len, 32, 8);
    p.batch = 1;
    return small_tiles_are_faster(p, kL2Bytes, 132);
  };
  for (const bool causal : {false, true}) {
    CHECK(small(1024, causal));
    CHECK_FALSE(small(6144, causal));
    CHECK_FALSE(small(8192, causal));
    CHECK_FALSE(small(16384, causal));
  }
  CHECK(small(2048, false));
  CHECK(small(2048, true));
  CHECK(small(4096, false));

  // Of a ring of four: halves of 1024 rows leave a ninth of the large tiles' rows empty, those of
  // 8192 less than a hundredth. In between, both sizes end at about the same time. Where keys come
  // from, and how many blocks there may be, makes no difference.
  const auto ring_small = [](int seq_len, int num_kv_heads = 8) {
    const int rows = seq_len / 4;
    std::vector<KeySegment> segments = {segment(rows, 0, 0)};
    for (int i = 0; i < 3; ++i) segments.push_back(segment(rows, kNoMask, rows / 2));
    BlockAttentionParams p = call(segments, rows, 32, num_kv_heads);
    p.batch = 1;
    const bool result = small_tiles_are_faster(p, kL2Bytes, 132);
    for (int i = 1; i < 4; ++i) segments[i].source = {&segments, rows};
    p.max_blocks = 7;
    CHECK(small_tiles_are_faster(p, kL2Bytes, 132) == result);
    return result;
  };
  CHECK_FALSE(ring_small(131072));
  CHECK_FALSE(ring_small(65536));
  CHECK(ring_small(8192));
  // With a KV head for each head, it would: keys that are fetched are shared by row tiles that
  // otherwise would not.
  for (int rows = 1024; rows <= 4096; rows += 64) {
    INFO(rows << " rows");
    ring_small(4 * rows, 32);
  }

  // The second of four ranks, 16384 tokens: with a KV head for each head, row tiles share keys, and
  // more large ones than small ones would walk over keys that they do not see.
  const auto second_small = [](int num_kv_heads) {
    const std::vector<KeySegment> segments = {segment(4096, 0, 0), segment(2048, kNoMask, 0),
                                              segment(4096, kNoMask, 2048),
                                              segment(4096, kNoMask, 2048)};
    BlockAttentionParams p = call(segments, 4096, 32, num_kv_heads);
    p.batch = 1;
    return small_tiles_are_faster(p, kL2Bytes, 132);
  };
  CHECK(second_small(32));
  CHECK_FALSE(second_small(8));
}
