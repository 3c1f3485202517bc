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

}  // namespace
