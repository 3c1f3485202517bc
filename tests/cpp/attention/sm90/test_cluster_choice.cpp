// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "attention/cuda/sm90/backward/cluster_choice.h"
#include "catch.h"

// How many thread blocks share the heads of a group in a backward (cluster_choice.h).

namespace {

using namespace ringattn::cuda::sm90;
using ringattn::cuda::QueryBounds;

constexpr Residency kHopper = {132, 66, 32}, kOddGroups = {132, 66, 30};

// B 1, 8 KV heads of 4 query heads, D 128.
WorkTiles tiles(int num_queries, int num_keys, bool causal) {
  const QueryBounds bounds = {num_queries, num_keys, causal ? num_keys - num_queries : num_keys, 0,
                              nullptr};
  return {bounds, 8, (num_keys + 127) / 128, 64, 128, 4};
}

TEST_CASE("as many thread blocks share a group's heads as end soonest", "[sm90]") {
  // 64 tiles of one length: those of 66 pairs in one round, those of fewer than 64 / 2 in three.
  CHECK(choose_ranks(tiles(2048, 1024, false), kHopper, false) == 2);
  CHECK(choose_ranks(tiles(2048, 1024, false), kOddGroups, false) == 2);
  // Long and short ones: two for each cluster.
  CHECK(choose_ranks(tiles(1024, 1024, true), kHopper, false) == 4);
  CHECK(choose_ranks(tiles(2048, 2048, true), kHopper, false) == 2);
  CHECK(choose_ranks(tiles(4096, 4096, true), kHopper, false) == 1);
  // One tile for all but four of the multiprocessors.
  CHECK(choose_ranks(tiles(2048, 2048, false), kHopper, false) == 1);
  CHECK(choose_ranks(tiles(8192, 65536, false), kHopper, false) == 1);
  // Of 1.45 tiles for each thread block, half make two; by ticket, lengths even out.
  CHECK(choose_ranks(tiles(2048, 3072, false), kHopper, false) > 1);
  CHECK(choose_ranks(tiles(2048, 3072, false), kHopper, true) == 1);
  CHECK(choose_ranks(tiles(4096, 4096, true), kHopper, true) == 1);
}

TEST_CASE("clusters fit into the multiprocessors that are left", "[sm90]") {
  const Residency left = kHopper.within(131);
  CHECK(left.of_one == 131);
  CHECK(left.of_two == 65);
  CHECK(left.of_four == 32);
  CHECK(kOddGroups.within(131).of_four == 30);
}

TEST_CASE("tiles of unequal lengths are given out by ticket where there are many", "[sm90]") {
  CHECK(gains_by_tickets(tiles(16384, 16384, true), 132));
  CHECK_FALSE(gains_by_tickets(tiles(8192, 8192, true), 132));
  CHECK_FALSE(gains_by_tickets(tiles(16384, 16384, false), 132));
}

TEST_CASE("pairs of thread blocks take tiles of keys where they end sooner", "[sm90]") {
  const auto gains = [](int num_queries, int num_keys, bool causal, int thread_blocks,
                        bool in_turn = false) {
    const WorkTiles single = tiles(num_queries, num_keys, causal);
    WorkTiles pairs = single;
    pairs.block_k = 256;
    pairs.num_key_tiles = (num_keys + 255) / 256;
    return gains_by_pairs(single, pairs, thread_blocks, in_turn);
  };
  for (const bool causal : {false, true}) {
    for (const int rows : {8192, 16384, 32768}) CHECK(gains(rows, rows, causal, 132));
    CHECK(gains(16384, 16384, causal, 131));
    for (const int rows : {64, 512, 1024, 3072}) CHECK_FALSE(gains(rows, rows, causal, 132));
  }
  // As many rounds of pairs as of thread blocks; one more.
  CHECK(gains(2048, 2048, false, 132));
  CHECK_FALSE(gains(2048, 2048 + 128, false, 132));
  // Pairs make 280 steps, thread blocks 264, and wait in turn for twice as many.
  CHECK_FALSE(gains(4096, 4096, true, 132));
  CHECK(gains(4096, 4096, true, 132, true));
  CHECK_FALSE(gains(3072, 3072, true, 132, true));
}

TEST_CASE("every thread block and part of dq of a tile of keys has a semaphore", "[sm90]") {
  for (const int num_keys : {1, 64, 65, 128, 129, 256, 257, 900}) {
    for (const int group : {1, 2, 4}) {
      ringattn::BlockAttentionBackwardParams p;
      p.batch = 3, p.num_queries = 1, p.num_keys = num_keys;
      p.num_kv_heads = 5, p.num_heads = 5 * group;
      const auto needs = [&](int keys, int thread_blocks) {
        return 1 + 3 * 5 * ringattn::ceil_div(int64_t{num_keys}, int64_t{keys}) * thread_blocks * 2;
      };
      CHECK(p.num_semaphores() >= needs(128, group));
      CHECK(p.num_semaphores() >= needs(256, 2));
      // The portable kernels: one for the rows of dq that take turns together.
      p.num_queries = 2 * num_keys;
      const int64_t turns = ringattn::ceil_div(int64_t{p.num_queries}, int64_t{p.kTurnRows});
      CHECK(p.num_semaphores() >= 3 * p.num_heads * turns);
    }
  }
}

TEST_CASE("a group of heads is shared where it can be", "[sm90]") {
  WorkTiles few = tiles(2048, 256, false);
  CHECK(choose_ranks(few, kHopper, false) == 4);
  CHECK(choose_ranks(few, {132, 66, 0}, false) == 2);
  CHECK(choose_ranks(few, {132, 0, 0}, false) == 1);
  few.heads = 6;
  CHECK(choose_ranks(few, kHopper, false) == 2);
  few.heads = 1;
  CHECK(choose_ranks(few, kHopper, false) == 1);
}

TEST_CASE("the busiest cluster is found among four", "[sm90]") {
  std::mt19937 random(1);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  for (int i = 0; i < 3000; ++i) {
    WorkTiles some = tiles(1 + below(6000), 1 + below(6000), below(2) == 0);
    some.planes = 1 + below(16);
    const int ranks = 1 << below(3), clusters = 1 + below(132);
    int64_t most = 0;
    for (int cluster = 0; cluster < clusters; ++cluster) {
      most = std::max(most, steps_of_cluster(some, ranks, clusters, cluster));
    }
    const int64_t found = busiest_steps(some, ranks, clusters);
    CAPTURE(i, ranks, clusters, some.count());
    CHECK(found <= most);
    // Lengths are rounded to query tiles: a tile of a round more or less.
    CHECK(found >= 0.9 * static_cast<double>(most) - 2 * some.heads / ranks);
  }
}

TEST_CASE("a slice has as few planes as leave no thread block idle", "[sm90]") {
  const auto planes = [](int tokens, bool causal, int least_rounds = 1) {
    return choose_planes_per_slice(tiles(tokens, tokens, causal), 1, 132, least_rounds);
  };
  // Tiles of one length: one round.
  CHECK(planes(16384, false) == 1);
  CHECK(planes(8192, false) == 2);
  CHECK(planes(4096, false) == 4);
  // Under a diagonal a second round evens out the first.
  CHECK(planes(32768, true) == 1);
  CHECK(planes(16384, true) == 2);
  CHECK(planes(8192, true) == 4);
  CHECK(planes(1024, true) == 8);
  CHECK(planes(131072, true) == 1);
  CHECK(planes(16384, true, 4) == 4);
  // 300 tiles of keys leave 96 of 132 thread blocks idle in their last round, three times as many
  // 24 of them.
  CHECK(planes(38400, false) == 3);
}

TEST_CASE("slices hardly prolong what the busiest cluster does", "[sm90]") {
  std::mt19937 random(2);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  for (int i = 0; i < 1000; ++i) {
    WorkTiles some = tiles(1 + below(60000), 1 + below(60000), below(2) == 0);
    some.planes = 1 + below(64);
    const int clusters = 1 + below(132);
    const int planes = choose_planes_per_slice(some, 1, clusters, 1);
    INFO(some.bounds.num_queries << " x " << some.bounds.num_keys << ", " << some.planes);
    REQUIRE(planes >= 1);
    REQUIRE(planes <= some.planes);
    WorkTiles slice = some, rest = some;
    slice.planes = planes;
    rest.planes = some.planes % planes;
    const int64_t steps = some.planes / planes * busiest_steps(slice, 1, clusters) +
                          (rest.planes > 0 ? busiest_steps(rest, 1, clusters) : 0);
    // The same in one slice of at most eight rounds' planes.
    slice.planes = std::clamp(8 * clusters / some.num_key_tiles, 1, some.planes);
    rest.planes = some.planes % slice.planes;
    const int64_t in_eight = some.planes / slice.planes * busiest_steps(slice, 1, clusters) +
                             (rest.planes > 0 ? busiest_steps(rest, 1, clusters) : 0);
    CHECK(steps <= in_eight + in_eight / 20);
  }
}

}  // namespace
