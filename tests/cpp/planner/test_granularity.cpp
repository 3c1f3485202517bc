// SPDX-License-Identifier: Apache-2.0
// Plans for kernels that compute whole tiles.
#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

#include "attention/cuda/sm90/scheduler/tile_selection.h"
#include "catch.h"
#include "partition/schedule.h"
#include "planner/planner.h"
#include "planning.h"

using ringattn::AttentionTile;
using ringattn::Layout;
using ringattn::ModelCost;
using ringattn::Partition;
using ringattn::Plan;
using ringattn::RankProfile;
using ringattn::Workload;
using ringattn::testing::kAttention;
using ringattn::testing::kLayouts;
using ringattn::testing::least_predicted_ms;
using ringattn::testing::Lengths;
using ringattn::testing::make_plan;
using ringattn::testing::slowest;

namespace {

using Tiles = std::vector<AttentionTile>;

/// Tiles of so many rows and keys; none of 1.
Tiles squares(int size) { return size == 1 ? Tiles{} : Tiles{{size, size, size}}; }

/// As kernels for Hopper have them, at D 128.
const Tiles kLargeAndSmall = ringattn::cuda::sm90::attention_tiles(128);

std::vector<RankProfile> in_tiles(const std::vector<double>& speeds, const Tiles& tiles) {
  std::vector<RankProfile> profiles(speeds.size());
  for (size_t rank = 0; rank < speeds.size(); ++rank) {
    profiles[rank].attention_tflops = profiles[rank].linear_tflops = 600.0 * speeds[rank];
    profiles[rank].tiles = tiles;
  }
  return profiles;
}

// The time of the tiles that `rank` computes, by looking at each: does any of its rows see any of
// its keys? Tiles of rows end at the first row that sees later owners' blocks.
double time_computed(const Partition& partition, int64_t rank, bool causal,
                     const AttentionTile& tile) {
  const std::vector<ringattn::Visit> visits = schedule(partition, rank, {causal});
  int64_t split = 0;
  double time = 0.0;
  for (const auto& visit : visits) split = std::max(split, visit.queries.begin);
  for (int64_t row = 0, end; row < partition.length(rank); row = end) {
    end = std::min(row + tile.rows, row < split ? split : partition.length(rank));
    int parts = 0, all_parts = tile.rows / tile.rows_per_warpgroup;
    for (int64_t part = row; part < end; part += tile.rows_per_warpgroup) ++parts;
    for (const auto& visit : visits) {
      if (!visit.visible() || visit.queries.begin > row) continue;
      for (int64_t key = 0; key < visit.keys.hull.end; key += tile.keys) {
        const bool sees = visit.visibility == ringattn::Visibility::kAll || end - 1 >= key;
        if (sees) time += (parts + 2.0) / (all_parts + 2.0);
      }
    }
    time += static_cast<double>(tile.overhead_keys) / tile.keys;
  }
  return time * tile.relative_cost;
}

}  // namespace

TEST_CASE("a plan counts the tiles that kernels compute") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t world_size = 1 + random() % 4;
    Tiles tiles;
    for (int kinds = 1 + random() % 2; kinds > 0; --kinds) {
      const int rows_per_warpgroup = 1 + random() % 3;
      tiles.push_back({rows_per_warpgroup * static_cast<int>(1 + random() % 4),
                       static_cast<int>(1 + random() % 9), rows_per_warpgroup,
                       static_cast<int>(1 + random() % 5), static_cast<int>(random() % 9)});
    }
    std::sort(tiles.begin(), tiles.end(), [](const AttentionTile& a, const AttentionTile& b) {
      return a.relative_cost * b.rows * b.keys < b.relative_cost * a.rows * a.keys;
    });
    const Layout layout = kLayouts[random() % 2];
    const bool causal = random() % 4 != 0;
    Lengths lengths(world_size), order(world_size);
    for (int64_t& length : lengths) length = random() % 4 ? random() % 50 : 0;
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const Partition partition(layout, lengths, order);
    INFO("trial " << trial << ": " << tiles.size() << " tiles, " << world_size << " ranks");

    const ModelCost cost{1.0, 0.0, 1};
    const std::vector<double> equal(world_size, 1.0);
    const auto ms = predict(partition, in_tiles(equal, tiles), cost, {causal});
    for (int64_t rank = 0; rank < world_size; ++rank) {
      double time = 1e300;
      for (const AttentionTile& tile : tiles) {
        time = std::min(time, time_computed(partition, rank, causal, tile));
      }
      // What begins and ends take, and keys under the mask of its own block, is in the speed of a
      // rank already.
      const AttentionTile& first = tiles.front();
      int64_t masked = 0;  // of all rows of whole tiles, until rows and keys end together
      const int64_t rows = std::lcm(first.rows, first.keys);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t end = row / first.rows * first.rows + first.rows;
        masked += (end + first.keys - 1) / first.keys * first.keys - row;
      }
      // Half a pair of each row with itself is seen, half is masked.
      const double more = causal ? static_cast<double>(masked) / rows - 0.5 : 0.0;
      const double expected = time / first.relative_cost * first.rows * first.keys -
                              static_cast<double>(lengths[rank]) * (first.overhead_keys + more);
      CHECK(ms[rank] * 600e9 == Approx(expected).margin(1e-6));
    }
  }
}

TEST_CASE("of tiles, no partition is much faster than the planned one") {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> speed(0.1, 1.0);
  double ratios = 0.0;
  constexpr int kTrials = 200;
  for (int trial = 0; trial < kTrials; ++trial) {
    const size_t world_size = 2 + random() % 2;
    const Layout layout = kLayouts[random() % 2];
    const Workload workload{{random() % 4 != 0}, false};
    const int tile = 2 + static_cast<int>(random() % 4);
    int64_t seq_len = 2 * tile * world_size * (1 + random() % (world_size == 2 ? 5 : 3));
    if (random() % 3 == 0) seq_len += random() % (2 * tile);
    std::vector<double> speeds(world_size);
    for (double& of_rank : speeds) of_rank = speed(random);
    const auto profiles = in_tiles(speeds, squares(tile));
    const Plan planned = make_plan(seq_len, profiles, kAttention, layout, workload);
    const double best = least_predicted_ms(seq_len, 1, profiles, kAttention, layout, workload);
    INFO("trial " << trial << ": " << seq_len << " tokens, " << world_size << " ranks");
    CHECK(slowest(planned.rank_ms) <= 1.4 * best);  // of a few tiles, each is much
    ratios += slowest(planned.rank_ms) / best;
  }
  CHECK(ratios / kTrials < 1.01);
}

TEST_CASE("of many tiles, no partition into halves of them is faster by a percent") {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> speed(0.1, 1.0);
  for (int trial = 0; trial < 12; ++trial) {
    const int64_t seq_len = 8192 + 128 * (random() % 8);
    const auto profiles = in_tiles({1.0, speed(random), speed(random)}, squares(128));
    const double best = least_predicted_ms(seq_len, 64, profiles, kAttention, Layout::kZigzag, {});
    CHECK(slowest(make_plan(seq_len, profiles).rank_ms) <= 1.01 * best);
  }
  double ratios = 0.0;
  constexpr int kTrials = 40;
  for (int trial = 0; trial < kTrials; ++trial) {
    const int64_t seq_len = 4096 + 64 * (random() % 300);
    const auto profiles = in_tiles({1.0, speed(random)}, kLargeAndSmall);
    INFO(seq_len << " tokens, speeds 1 and " << profiles[1].attention_tflops / 600);
    const double best = least_predicted_ms(seq_len, 32, profiles, kAttention, Layout::kZigzag, {});
    const double planned = slowest(make_plan(seq_len, profiles).rank_ms);
    CHECK(planned <= 1.02 * best);
    ratios += planned / best;
  }
  CHECK(ratios / kTrials < 1.005);
}

TEST_CASE("a rank that is a little slower has fewer tiles, not fewer rows in as many") {
  // Halves of 2112 rows are 11 large tiles, those of 2048 as many, of which one lacks a part.
  const Plan planned = make_plan(8192, in_tiles({1.0, 0.954}, kLargeAndSmall));
  CHECK(planned.partition.lengths() == Lengths{4224, 3968});
  // What gains less than a hundredth is not known to gain anything.
  CHECK(make_plan(8192, in_tiles({1.0, 0.99}, kLargeAndSmall)).partition.lengths() ==
        Lengths{4096, 4096});
}

TEST_CASE("no plan in tiles is faster than its ideal") {
  for (const int64_t seq_len : {128, 256, 384, 512, 1000}) {
    for (const auto& speeds : std::vector<std::vector<double>>{{1.0}, {1.0, 1.0}, {1.0, 0.5}}) {
      const Plan planned = make_plan(seq_len, in_tiles(speeds, kLargeAndSmall));
      CHECK(planned.ideal_ms <= slowest(planned.rank_ms));
    }
  }
}

TEST_CASE("of short sequences, plans do not depend on how ranks are numbered") {
  std::vector<double> speeds = {1.0, 1.0, 0.5, 0.1, 1.0, 0.5};
  double least = 0.0, most = 0.0;
  for (int shift = 0; shift < 6; ++shift) {
    const Workload workload = {{/*causal=*/false}, /*training=*/false};
    const double ms = slowest(
        make_plan(1000, in_tiles(speeds, kLargeAndSmall), kAttention, Layout::kZigzag, workload)
            .rank_ms);
    least = shift == 0 ? ms : std::min(least, ms);
    most = std::max(most, ms);
    std::rotate(speeds.begin(), speeds.begin() + 1, speeds.end());
  }
  CHECK(most <= 1.3 * least);
}

TEST_CASE("a few thousand tokens are dealt in whole tiles") {
  // 16384 tokens, kernels in tiles of 128: no halves that end inside a tile.
  for (const auto& speeds : std::vector<std::vector<double>>{{1.0, 1.0, 1.0, 0.6},
                                                             {1.0, 1.0, 0.6, 0.6},
                                                             {1.0, 0.6, 0.6, 0.6},
                                                             {1.0, 1.0, 1.0, 0.11},
                                                             {1.0, 1.0, 0.11, 0.11},
                                                             {1.0, 0.11, 0.11, 0.11}}) {
    const Partition planned = make_plan(16384, in_tiles(speeds, squares(128))).partition;
    for (int64_t rank = 0; rank < 4; ++rank) {
      const bool innermost = planned.place(rank) == 3;
      INFO("rank " << rank << ": " << planned.length(rank));
      CHECK(planned.length(rank) % (innermost ? 128 : 256) == 0);
    }
    // Than what is best without tiles: faster, in tiles.
    const Partition other = make_plan(16384, in_tiles(speeds, {})).partition;
    CHECK(slowest(predict(planned, in_tiles(speeds, squares(128)), kAttention, {})) <=
          slowest(predict(other, in_tiles(speeds, squares(128)), kAttention, {})));
  }
}

TEST_CASE("tiles or not, equal ranks keep equal lengths, and no plan is slower than even ones") {
  // Halves of 2056 rows take 17 tiles of 128; others would save 3 %.
  for (const int64_t seq_len : {16384, 16448, 1000, 100003}) {
    const Plan equal = make_plan(seq_len, in_tiles({1.0, 1.0, 1.0, 1.0}, squares(128)));
    for (int64_t rank = 0; rank < 4; ++rank) {
      CHECK(equal.partition.length(rank) == seq_len / 4 + (rank < seq_len % 4));
    }
  }
  std::mt19937 random(3);
  std::uniform_real_distribution<double> speed(0.8, 1.0);
  for (int trial = 0; trial < 200; ++trial) {
    const int64_t world_size = 2 + random() % 7, seq_len = 1 + random() % 60000;
    std::vector<double> speeds(world_size);
    for (double& of_rank : speeds) of_rank = speed(random);
    const auto profiles = in_tiles(speeds, squares(128));
    const Layout layout = kLayouts[random() % 2];
    Lengths even(world_size);
    for (int64_t rank = 0; rank < world_size; ++rank) {
      even[rank] = seq_len / world_size + (rank < seq_len % world_size);
    }
    const auto even_ms = predict(Partition(layout, even), profiles, kAttention, {});
    const Plan planned = make_plan(seq_len, profiles, kAttention, layout);
    CHECK(slowest(planned.rank_ms) <= slowest(even_ms) * (1 + 1e-9));
    CHECK(planned.partition.seq_len() == seq_len);
  }
}

TEST_CASE("that lengths gain little over even ones does not hide what links make of them") {
  // Speeds that are almost equal, links that are not: without waits, even lengths would do.
  auto profiles = in_tiles({0.990, 0.995}, squares(128));
  const ModelCost cost{16384.0, 0.0, 8192};
  const Partition even(Layout::kZigzag, {24256, 24256});
  CHECK(make_plan(48512, profiles, cost).partition.lengths() == even.lengths());
  profiles[0].link_gbps = 16.5;
  profiles[1].link_gbps = 33.0;
  const double even_ms = slowest(predict(even, profiles, cost, {}));
  const double planned_ms = slowest(make_plan(48512, profiles, cost).rank_ms);
  CHECK(planned_ms < 0.97 * even_ms);
  CHECK(planned_ms > 0.90 * even_ms);  // less than equal ranks part with even lengths for
}

TEST_CASE("limits of memory hold where tiles would take more") {
  auto profiles = in_tiles({1.0, 0.5, 0.5}, squares(128));
  for (const int64_t seq_len : {8192, 8200, 8300}) {
    for (const int64_t room : {3000, 3072, 3080}) {
      profiles[0].max_tokens = room;
      profiles[2].max_tokens = 2600;
      const Partition planned = make_plan(seq_len, profiles).partition;
      CHECK(planned.length(0) <= room);
      CHECK(planned.length(2) <= 2600);
      CHECK(planned.seq_len() == seq_len);
    }
  }
}

TEST_CASE("tiles that are none are refused") {
  for (const AttentionTile& tile :
       Tiles{{0, 1}, {1, 0}, {4, 1, 3}, {4, 1, 0}, {4, 1, 4, 0}, {4, 1, 4, 1, -1}}) {
    const auto profiles = in_tiles({1.0, 1.0}, {tile});
    CHECK_THROWS_AS(make_plan(16, profiles), std::invalid_argument);
    CHECK_THROWS_AS(predict(Partition(Layout::kZigzag, {8, 8}), profiles, kAttention, {}),
                    std::invalid_argument);
  }
  CHECK_NOTHROW(make_plan(16, in_tiles({1.0, 1.0}, {{4, 4, 4, 9}, {4, 8, 4, 18}})));
  // The fastest kind comes first.
  CHECK_THROWS_AS(make_plan(16, in_tiles({1.0, 1.0}, {{4, 4, 4, 9}, {4, 8, 4, 17}})),
                  std::invalid_argument);
}
