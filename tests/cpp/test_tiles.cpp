// SPDX-License-Identifier: Apache-2.0
// Plans for kernels that compute whole tiles.
#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

#include "catch.h"
#include "partition/planner.h"
#include "partition/schedule.h"
#include "plans.h"

using ringattn::Layout;
using ringattn::ModelCost;
using ringattn::Partition;
using ringattn::Plan;
using ringattn::RankProfile;
using ringattn::Workload;
using ringattn::testing::kAttention;
using ringattn::testing::kLayouts;
using ringattn::testing::kMostPlanningMs;
using ringattn::testing::least_predicted_ms;
using ringattn::testing::Lengths;
using ringattn::testing::make_plan;
using ringattn::testing::planning_ms;
using ringattn::testing::slowest;

namespace {

std::vector<RankProfile> in_tiles(const std::vector<double>& speeds, int64_t tile) {
  std::vector<RankProfile> profiles(speeds.size());
  for (size_t rank = 0; rank < speeds.size(); ++rank) {
    profiles[rank].attention_tflops = profiles[rank].linear_tflops = 600.0 * speeds[rank];
    profiles[rank].tile_tokens = tile;
  }
  return profiles;
}

// Pairs in the tiles that `rank` computes, by looking at each: does any of its rows see any of its
// keys? Tiles of rows end at the first row that sees later owners' blocks.
int64_t pairs_computed(const Partition& partition, int64_t rank, bool causal, int64_t tile) {
  const auto visits = schedule(partition, rank, causal);
  int64_t split = 0, count = 0;
  for (const auto& visit : visits) split = std::max(split, visit.query_begin);
  for (int64_t row = 0, end; row < partition.length(rank); row = end) {
    end = std::min(row + tile, row < split ? split : partition.length(rank));
    for (const auto& visit : visits) {
      for (int64_t key = 0; key < visit.key_end; key += tile) {
        const bool sees = !visit.diagonal || end - 1 >= key;
        count += sees && visit.query_begin <= row;
      }
    }
  }
  return count * tile * tile;
}

}  // namespace

TEST_CASE("a plan counts the tiles that kernels compute") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t world_size = 1 + random() % 4, tile = 1 + random() % 9;
    const Layout layout = kLayouts[random() % 2];
    const bool causal = random() % 4 != 0;
    Lengths lengths(world_size), order(world_size);
    for (int64_t& length : lengths) length = random() % 4 ? random() % 50 : 0;
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const Partition partition(layout, lengths, order);
    INFO("trial " << trial << ": tiles of " << tile << ", " << world_size << " ranks");

    const ModelCost cost{1.0, 0.0, 1};
    const std::vector<double> equal(world_size, 1.0);
    const auto ms = predict(partition, in_tiles(equal, tile), cost, {causal});
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const double computed = static_cast<double>(pairs_computed(partition, rank, causal, tile));
      // Under the mask of its own block, half a tile for each row is in the speed of a rank
      // already.
      const double masked = causal ? static_cast<double>(lengths[rank] * tile) / 2 : 0.0;
      const double expected = tile == 1 ? ms[rank] * 600e9 : computed - masked;
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
    const Workload workload{random() % 4 != 0, random() % 4 == 0};
    const int64_t tile = 2 + random() % 4;
    int64_t seq_len = 2 * tile * world_size * (1 + random() % (world_size == 2 ? 5 : 3));
    if (random() % 3 == 0) seq_len += random() % (2 * tile);
    std::vector<double> speeds(world_size);
    for (double& of_rank : speeds) of_rank = speed(random);
    const auto profiles = in_tiles(speeds, tile);
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
    const auto profiles = in_tiles({1.0, speed(random), speed(random)}, 128);
    const double best = least_predicted_ms(seq_len, 64, profiles, kAttention, Layout::kZigzag, {});
    CHECK(slowest(make_plan(seq_len, profiles).rank_ms) <= 1.01 * best);
  }
}

TEST_CASE("a few thousand tokens are dealt in whole tiles") {
  // 16384 tokens, kernels in tiles of 128: no halves that end inside a tile.
  for (const auto& speeds : std::vector<std::vector<double>>{{1.0, 1.0, 1.0, 0.6},
                                                             {1.0, 1.0, 0.6, 0.6},
                                                             {1.0, 0.6, 0.6, 0.6},
                                                             {1.0, 1.0, 1.0, 0.11},
                                                             {1.0, 1.0, 0.11, 0.11},
                                                             {1.0, 0.11, 0.11, 0.11}}) {
    const Partition planned = make_plan(16384, in_tiles(speeds, 128)).partition;
    for (int64_t rank = 0; rank < 4; ++rank) {
      const bool innermost = planned.place(rank) == 3;
      INFO("rank " << rank << ": " << planned.length(rank));
      CHECK(planned.length(rank) % (innermost ? 128 : 256) == 0);
    }
    // Than what is best without tiles: faster, in tiles.
    const Partition other = make_plan(16384, in_tiles(speeds, 1)).partition;
    CHECK(slowest(predict(planned, in_tiles(speeds, 128), kAttention, {})) <=
          slowest(predict(other, in_tiles(speeds, 128), kAttention, {})));
  }
}

TEST_CASE("tiles or not, equal ranks keep equal lengths, and no plan is slower than even ones") {
  // Halves of 2056 rows take 17 tiles of 128; others would save 3 %.
  for (const int64_t seq_len : {16384, 16448, 1000, 100003}) {
    const Plan equal = make_plan(seq_len, in_tiles({1.0, 1.0, 1.0, 1.0}, 128));
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
    const auto profiles = in_tiles(speeds, 128);
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

TEST_CASE("limits of memory hold where tiles would take more") {
  auto profiles = in_tiles({1.0, 0.5, 0.5}, 128);
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

TEST_CASE("planning a million tokens in tiles over eight ranks takes less than 5 ms") {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> speed(0.1, 1.0);
  for (const Layout layout : kLayouts) {
    for (const bool linked : {false, true}) {
      double best_ms = 1e9;
      for (int trial = 0; trial < 6; ++trial) {
        std::vector<double> speeds(8);
        for (double& of_rank : speeds) of_rank = speed(random);
        auto profiles = in_tiles(speeds, 128);
        for (RankProfile& profile : profiles) {
          if (linked) profile.link_gbps = random() % 3 ? 20.0 : 1.0;
        }
        best_ms = std::min(best_ms, planning_ms(profiles, kAttention, layout));
      }
      CHECK(best_ms < kMostPlanningMs);
    }
  }
}

TEST_CASE("tiles that are none are refused") {
  CHECK_THROWS_AS(make_plan(16, in_tiles({1.0, 1.0}, 0)), std::invalid_argument);
}
