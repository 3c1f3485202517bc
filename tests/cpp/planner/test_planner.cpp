// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

#include "catch.h"
#include "planner/planner.h"
#include "planner/ring_simulation.h"
#include "planning.h"

using ringattn::Layout;
using ringattn::ModelCost;
using ringattn::Partition;
using ringattn::Plan;
using ringattn::RankProfile;
using ringattn::Workload;
using ringattn::testing::kAttention;
using ringattn::testing::kLayer;
using ringattn::testing::kLayouts;
using ringattn::testing::least_ms;
using ringattn::testing::Lengths;
using ringattn::testing::make_plan;
using ringattn::testing::slowest;
using ringattn::testing::with_speeds;

namespace {

std::vector<RankProfile> random_profiles(std::mt19937& random, size_t world_size, int64_t seq_len) {
  std::uniform_real_distribution<double> speed(0.05, 1.0);
  std::vector<RankProfile> profiles(world_size);
  for (RankProfile& profile : profiles) {
    profile.attention_tflops = speed(random);
    profile.linear_tflops = speed(random);
    // In the order of what a few tokens take, so that it pays to leave ranks out.
    if (random() % 2) profile.overhead_ms = speed(random) * 2e-8 * static_cast<double>(seq_len);
  }
  // Room for all of it at least on one rank.
  for (size_t rank = 0; rank + 1 < world_size; ++rank) {
    if (random() % 3 == 0) profiles[rank].max_tokens = random() % (seq_len + 1);
  }
  std::shuffle(profiles.begin(), profiles.end(), random);
  return profiles;
}

// By the definition: pairs counted one rank after the other, nothing shared with the planner.
double reference_ms(const Lengths& lengths, const Lengths& order,
                    const std::vector<RankProfile>& profiles, const ModelCost& cost, Layout layout,
                    bool causal) {
  const double seq_len = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  double before = 0.0, worst = 0.0;
  for (const int64_t rank : order) {
    const double n = static_cast<double>(lengths[rank]);
    double pairs = n * seq_len;
    if (causal) pairs = layout == Layout::kZigzag ? pairs / 2 : n * before + n * n / 2;
    before += n;
    if (n == 0) continue;
    const RankProfile& profile = profiles[rank];
    const double attention = cost.attention_flops * pairs / (profile.attention_tflops * 1e9);
    const double linear = cost.linear_flops * n / (profile.linear_tflops * 1e9);
    worst = std::max(worst, profile.overhead_ms + attention + linear);
  }
  return worst;
}

// The least of reference_ms over all lengths in steps of `unit`, and all orders where they count.
double brute_force_ms(int64_t seq_len, int64_t unit, const std::vector<RankProfile>& profiles,
                      const ModelCost& cost, Layout layout, bool causal) {
  const bool orders_count = layout == Layout::kContiguous && causal;
  return least_ms(seq_len, unit, profiles, orders_count,
                  [&](const Lengths& lengths, const Lengths& order) {
                    return reference_ms(lengths, order, profiles, cost, layout, causal);
                  });
}

}  // namespace

TEST_CASE("no partition is faster than the planned one") {
  std::mt19937 random(1);
  int dropped = 0;
  for (int trial = 0; trial < 600; ++trial) {
    const size_t world_size = 1 + random() % 4;
    const int64_t seq_len = random() % (world_size == 4 ? 24 : 60);
    const Layout layout = kLayouts[random() % 2];
    const bool causal = random() % 3 != 0;
    // Attention and products of about the same weight.
    const ModelCost cost{16.0, random() % 3 ? 8.0 * static_cast<double>(seq_len) : 0.0, 8};
    const auto profiles = random_profiles(random, world_size, seq_len);
    const Plan planned = make_plan(seq_len, profiles, cost, layout, {{causal}, false});
    const double best = brute_force_ms(seq_len, 1, profiles, cost, layout, causal);
    INFO("trial " << trial << ": " << seq_len << " tokens, " << world_size << " ranks");
    CHECK(planned.partition.seq_len() == seq_len);
    CHECK(slowest(planned.rank_ms) == Approx(best).epsilon(1e-9));
    CHECK(planned.ideal_ms <= best * (1 + 1e-9));
    for (size_t rank = 0; rank < world_size; ++rank) {
      const int64_t tokens = planned.partition.length(rank);
      CHECK(tokens <= profiles[rank].max_tokens.value_or(tokens));
      dropped += tokens == 0 && profiles[rank].max_tokens.value_or(1) > 0;
    }
  }
  CHECK(dropped > 100);  // or the overheads have no part in this test
}

TEST_CASE("long sequences are dealt in units that cost next to nothing") {
  std::mt19937 random(2);
  int in_units = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const size_t world_size = 2 + random() % 2;
    const int64_t unit = 64;
    const int64_t seq_len = unit * (64 + random() % 20) * world_size;
    const Layout layout = kLayouts[random() % 2];
    const auto profiles = random_profiles(random, world_size, seq_len);
    const Plan planned = make_plan(seq_len, profiles, kLayer, layout);
    const double by_units =
        brute_force_ms(seq_len, unit, profiles, kLayer, layout, /*causal=*/true);
    INFO("trial " << trial << ": " << seq_len << " tokens, " << world_size << " ranks");
    CHECK(slowest(planned.rank_ms) <= by_units * (1 + 5e-3));
    const auto aligned = [&](int64_t length) { return length % 16 == 0; };
    in_units += std::all_of(planned.partition.lengths().begin(), planned.partition.lengths().end(),
                            aligned);
  }
  CHECK(in_units > 100);
}

TEST_CASE("equal ranks get the even split, and no plan without latency is slower than it") {
  for (const int64_t seq_len : {0, 1, 7, 1000, 4096, 100003, 1 << 20}) {
    for (const int64_t world_size : {1, 2, 3, 8}) {
      const Plan equal =
          make_plan(seq_len, with_speeds(std::vector<double>(world_size, 1.0)), kLayer);
      for (int64_t rank = 0; rank < world_size; ++rank) {
        CHECK(equal.partition.length(rank) == seq_len / world_size + (rank < seq_len % world_size));
        CHECK(equal.partition.place(rank) == rank);
      }
    }
  }
  std::mt19937 random(3);
  std::normal_distribution<double> noise(1.0, 0.01);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t world_size = 2 + random() % 7;
    std::vector<double> speeds(world_size);
    for (double& speed : speeds) speed = noise(random) * (random() % 4 ? 1.0 : 0.5);
    auto profiles = with_speeds(speeds);
    const Workload workload = {{true}, trial % 4 > 1};
    if (trial % 2) {
      const double gbps = std::vector{3.0, 25.0, 300.0}[random() % 3];
      for (RankProfile& profile : profiles) profile.link_gbps = gbps;
    }
    const int64_t seq_len = 1 + random() % 200000;
    const Layout layout = kLayouts[random() % 2];
    Lengths even(world_size);
    for (int64_t rank = 0; rank < world_size; ++rank) {
      even[rank] = seq_len / world_size + (rank < seq_len % world_size);
    }
    const auto even_ms = predict(Partition(layout, even), profiles, kLayer, workload);
    const Plan planned = make_plan(seq_len, profiles, kLayer, layout, workload);
    CHECK(slowest(planned.rank_ms) <= slowest(even_ms));
  }
}

TEST_CASE("predictions are those of the definition") {
  const auto profiles = with_speeds({1.0, 0.25, 0.5});
  const Lengths lengths = {700, 100, 200}, order = {2, 0, 1};
  for (const Layout layout : kLayouts) {
    for (const bool causal : {false, true}) {
      const auto ms = predict(Partition(layout, lengths, order), profiles, kLayer, {{causal}});
      const double expected = reference_ms(lengths, order, profiles, kLayer, layout, causal);
      CHECK(slowest(ms) == Approx(expected).epsilon(1e-12));
    }
  }
  CHECK_THROWS_AS(predict(Partition(Layout::kZigzag, {1, 1}), profiles, kLayer, {}),
                  std::invalid_argument);
}

TEST_CASE("the ideal knows neither overheads nor limits nor rounding") {
  auto profiles = with_speeds({1.0, 0.5, 0.25});
  const double seq_len = 30000.0;
  double rate = 0.0;
  for (const RankProfile& profile : profiles) {
    rate += 1 / (kLayer.linear_flops / (profile.linear_tflops * 1e9) +
                 kLayer.attention_flops * seq_len / 2 / (profile.attention_tflops * 1e9));
  }
  profiles[0].max_tokens = 12000;
  profiles[1].overhead_ms = 0.1;
  CHECK(make_plan(30000, profiles, kLayer).ideal_ms == Approx(seq_len / rate).epsilon(1e-9));
  // Attention alone takes the same whatever the layout.
  const double attention = 16384.0 * seq_len * seq_len / 2 / (550e9 * 1.75);
  for (const Layout layout : kLayouts) {
    const Plan planned = make_plan(30000, with_speeds({1.0, 0.5, 0.25}), kAttention, layout);
    CHECK(planned.ideal_ms == Approx(attention).epsilon(1e-9));
    CHECK(slowest(planned.rank_ms) <= attention * 1.005);
  }
}

TEST_CASE("the ideal is of the best order, whatever order overheads and limits ask for") {
  std::vector<RankProfile> profiles(3);
  for (RankProfile& profile : profiles) profile.attention_tflops = 300.0;
  for (RankProfile& profile : profiles) profile.linear_tflops = 60.0;
  profiles[2].attention_tflops = 60.0;
  profiles[2].linear_tflops = 600.0;
  const ModelCost layer{16384.0, 436e6, 4096};
  const auto ideal_ms = [&] {
    return make_plan(30000, profiles, layer, Layout::kContiguous).ideal_ms;
  };
  const double ideal = ideal_ms();
  profiles[0].overhead_ms = 5.0;
  profiles[1].overhead_ms = 20.0;
  profiles[2].max_tokens = 3000;
  CHECK(ideal_ms() == Approx(ideal).epsilon(1e-6));
}

TEST_CASE("contiguous boundaries lie at the square roots of the speeds' shares") {
  const Plan planned =
      make_plan(1 << 16, with_speeds({1.0, 1.0, 1.0}), kAttention, Layout::kContiguous);
  double before = 0.0;
  for (int64_t rank = 0; rank < 3; ++rank) {
    before += static_cast<double>(planned.partition.length(rank));
    CHECK(before / (1 << 16) == Approx(std::sqrt((rank + 1) / 3.0)).epsilon(2e-3));
  }
}

TEST_CASE("with the minimum depth no rank waits") {
  const auto planned = [](const std::vector<double>& speeds, std::optional<int64_t> depth = {}) {
    return make_plan(1 << 20, with_speeds(speeds), kAttention, Layout::kZigzag, {}, depth);
  };
  CHECK(planned({1.0}).min_depth == 1);
  CHECK(planned({1.0, 0.1}).min_depth == 1);
  CHECK(planned({1.0, 1.0, 1.0, 1.0}).min_depth == 1);
  CHECK(planned({1.0, 0.1, 0.1, 0.1}).min_depth == 3);
  // Planned for one block ahead, the lengths are others, which need no more.
  CHECK(planned({1.0, 0.1, 0.1, 0.1}, 1).min_depth == 1);
  // Two slow ranks are put apart.
  CHECK(planned({1.0, 1.0, 0.25, 0.25}).min_depth == 1);
  CHECK(planned({1.0, 1.0, 0.25, 0.25}).partition.order() == Lengths{0, 3, 1, 2});
  CHECK(planned({1.0, 1.0, 0.25, 0.25}, 1).partition.order() == Lengths{0, 3, 1, 2});
  CHECK(planned({1.0, 1.0, 1.0, 0.25}).partition.order() == Lengths{0, 1, 2, 3});
}

TEST_CASE("waits for blocks are in the predicted times") {
  const auto ms = [](std::vector<RankProfile> profiles, std::optional<int64_t> depth = {}) {
    return slowest(make_plan(1 << 14, profiles, kAttention, Layout::kZigzag, {}, depth).rank_ms);
  };
  auto profiles = with_speeds({1.0, 1.0, 1.0, 1.0});
  const double alone = ms(profiles);
  for (RankProfile& profile : profiles) profile.link_gbps = 200.0;
  CHECK(ms(profiles) == Approx(alone).epsilon(1e-9));  // 4096 tokens of 4 KB: 0.08 ms each
  for (RankProfile& profile : profiles) profile.link_gbps = 0.1;
  const double transfers = 3 * 4096 * 4096 / 0.1e6;  // of the last step's block, half as much
  const auto even_ms = [&](const std::vector<RankProfile>& given) {
    return slowest(predict(Partition(Layout::kZigzag, Lengths(4, 1 << 12)), given, kAttention, {},
                           std::nullopt));
  };
  CHECK(even_ms(profiles) > 0.5 * transfers);
  CHECK(even_ms(profiles) < alone + transfers);
  // A fast rank among slow ones waits where only one block is under way.
  const auto unequal = with_speeds({1.0, 0.1, 0.1, 0.1});
  const Partition deep = make_plan(1 << 14, unequal, kAttention).partition;
  const auto at = [&](int64_t depth) {
    return slowest(predict(deep, unequal, kAttention, {}, depth));
  };
  CHECK(at(1) > 1.1 * at(3));
  CHECK(at(3) == slowest(predict(deep, unequal, kAttention, {})));
  // Lengths that are planned for it wait less.
  CHECK(ms(unequal, 1) < 0.95 * at(1));
  CHECK_THROWS_AS(at(0), std::invalid_argument);
}

TEST_CASE("the depth is the one asked for, or all there is") {
  const auto depth = [](const std::vector<double>& speeds, std::optional<int64_t> asked) {
    return make_plan(4096, with_speeds(speeds), kAttention, Layout::kZigzag, {}, asked).depth;
  };
  CHECK(depth({1.0}, std::nullopt) == 1);
  CHECK(depth({1.0, 0.5, 1.0, 1.0}, std::nullopt) == 3);
  CHECK(depth({1.0, 0.5, 1.0, 1.0}, 2) == 2);
  CHECK(depth({1.0, 0.5}, 9) == 1);
}

TEST_CASE("a ring without waits takes what its attention takes") {
  std::mt19937 random(4);
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t world_size = 1 + random() % 6;
    Lengths lengths(world_size);
    for (int64_t& length : lengths) length = 2 * (random() % 500);
    const Partition partition(Layout::kZigzag, lengths);
    auto profiles = with_speeds(std::vector<double>(world_size, 0.5));
    // Links that are fast enough, so that the exchange is simulated.
    for (RankProfile& profile : profiles) profile.link_gbps = 1e12;
    const auto ms = predict(partition, profiles, kAttention, {}, world_size);
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const double pairs = static_cast<double>(lengths[rank] * partition.seq_len()) / 2;
      CHECK(ms[rank] == Approx(16384.0 * pairs / 275e9).epsilon(1e-12));
    }
  }
}

TEST_CASE("a ring waits for its links and for slow owners") {
  // Two ranks, dense: 100 rows each, 1 ms for 100 x 100 pairs, 2 ms for a block of 100 rows.
  std::vector<RankProfile> profiles(2);
  for (RankProfile& profile : profiles) {
    profile.attention_tflops = 1e-5;
    profile.linear_tflops = 1.0;
    profile.link_gbps = 0.05;
    profile.link_latency_us = 250.0;
  }
  const ModelCost cost{1.0, 0.0, 1000};
  const Partition two(Layout::kZigzag, {100, 100});
  CHECK(predict(two, profiles, cost, {{false}}, 1)[0] == Approx(1e5 / 5e4 + 0.25 + 1.0));
  // Without links, four ranks of which the second is five times as slow: with depth 1 the message
  // of step 2 leaves it when it has attended to its own block, with depth 2 at once.
  profiles.assign(4, RankProfile());
  for (RankProfile& profile : profiles) profile.attention_tflops = 1e-5;
  for (RankProfile& profile : profiles) profile.linear_tflops = 1.0;
  profiles[1].attention_tflops = 2e-6;
  const Partition four(Layout::kZigzag, {100, 100, 100, 100});
  CHECK(predict(four, profiles, cost, {{false}}, 1)[3] == Approx(5.0 + 2.0));
  CHECK(predict(four, profiles, cost, {{false}}, 3)[3] == Approx(4.0));
  // A rank's messages move one after the other, whatever the depth: 6 ms for three, then 1 ms.
  for (RankProfile& profile : profiles) profile.link_gbps = 0.05;
  CHECK(predict(four, profiles, cost, {{false}}, 3)[3] == Approx(3 * 2.0 + 1.0));
}

TEST_CASE("memory is the buffers that the plan's depth takes") {
  // Causal zigzag of equal ranks: at most all of a block is sent, and comes to some.
  const Plan planned =
      make_plan(4000, with_speeds({1.0, 1.0}), kAttention, Layout::kZigzag, {false});
  CHECK(planned.memory_bytes == Lengths{4096 * 4000, 4096 * 4000});
  const Plan lone = make_plan(4000, with_speeds({1.0}), kAttention);
  CHECK(lone.memory_bytes == Lengths{0});
  const Plan deep =
      make_plan(4000, with_speeds({1.0, 1.0, 1.0, 1.0}), kAttention, Layout::kZigzag, {false}, 3);
  CHECK(deep.memory_bytes == Lengths(4, 4096 * 4000));
  CHECK(deep.depth == 3);
  const Plan shallow =
      make_plan(4000, with_speeds({1.0, 1.0, 1.0, 1.0}), kAttention, Layout::kZigzag, {false}, 1);
  CHECK(shallow.memory_bytes == Lengths(4, 4096 * 3000));
}

TEST_CASE("memory in training is all blocks, and gradients in float32") {
  const auto profiles = with_speeds({1.0, 1.0, 1.0, 1.0});
  const Workload dense{{false}, true};
  const auto memory = [&](int64_t depth) {
    return make_plan(4000, profiles, kAttention, Layout::kZigzag, dense, depth).memory_bytes;
  };
  // Four blocks; gradients of the own one, and of three for each way.
  CHECK(memory(3) == Lengths(4, 4096 * (4000 + 2 * 7000)));
  CHECK(memory(1) == memory(3));
  const Plan lone = make_plan(4000, with_speeds({1.0}), kAttention, Layout::kZigzag, dense);
  CHECK(lone.memory_bytes == Lengths{4096 * 2 * 4000});
  // Causal: rank 0 uses both blocks whole, and all of its own is used by none.
  const Partition zigzag(Layout::kZigzag, {100, 300, 200});
  CHECK(gradient_tokens(zigzag, 0, {true}) == 100 + (300 + 200) + (50 + 50));
  CHECK(gradient_tokens(zigzag, 2, {true}) == 200 + (150 + 50) + (200 + 200));
}

TEST_CASE("a ring holds nothing on a rank without tokens") {
  for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
    for (const bool causal : {true, false}) {
      for (const int64_t depth : {1, 3}) {
        const Partition partition(layout, {0, 6000, 8000, 4000});
        CHECK(buffered_tokens(partition, 0, {causal}, depth) == 0);
        CHECK(gradient_tokens(partition, 0, {causal}) == 0);
        CHECK(buffered_tokens(partition, 2, {causal}, depth) > 0);
      }
    }
  }
}

TEST_CASE("cached keys lie where they are read fastest") {
  auto profiles = with_speeds({1.0, 0.1, 1.0});
  CHECK(plan_cache(10, profiles, kLayer) == Lengths{4, 3, 3});  // no bandwidth is known
  for (size_t rank = 0; rank < 3; ++rank) profiles[rank].memory_gbps = rank == 1 ? 1000.0 : 4000.0;
  CHECK(plan_cache(9000, profiles, kLayer) == Lengths{4000, 1000, 4000});
  profiles[0].max_tokens = 2000;
  CHECK(plan_cache(9000, profiles, kLayer) == Lengths{2000, 1400, 5600});
  profiles[2].memory_gbps.reset();
  CHECK_THROWS_AS(plan_cache(9000, profiles, kLayer), std::invalid_argument);
  CHECK_THROWS_AS(plan_cache(-1, with_speeds({1.0}), kLayer), std::invalid_argument);
}

TEST_CASE("what cannot be planned is refused") {
  auto profiles = with_speeds({1.0, 1.0});
  CHECK_THROWS_AS(make_plan(10, {}, kLayer), std::invalid_argument);
  CHECK_THROWS_AS(make_plan(-1, profiles, kLayer), std::invalid_argument);
  CHECK_THROWS_AS(make_plan(10, profiles, kLayer, Layout::kZigzag, {}, 0), std::invalid_argument);
  for (RankProfile& profile : profiles) profile.max_tokens = 4;
  CHECK_THROWS_AS(make_plan(10, profiles, kLayer), std::invalid_argument);
  CHECK(make_plan(8, profiles, kLayer).partition.lengths() == Lengths{4, 4});
}
