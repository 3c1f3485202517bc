// SPDX-License-Identifier: Apache-2.0
// Plans where ranks wait for blocks: links decide which ranks take part, with how many tokens.
#include <algorithm>
#include <cmath>
#include <random>

#include "catch.h"
#include "planner/planner.h"
#include "planning.h"

using ringattn::Layout;
using ringattn::ModelCost;
using ringattn::Partition;
using ringattn::Plan;
using ringattn::RankProfile;
using ringattn::Workload;
using ringattn::testing::kAttention;
using ringattn::testing::least_predicted_ms;
using ringattn::testing::Lengths;
using ringattn::testing::make_plan;
using ringattn::testing::slowest;

namespace {

using Depth = std::optional<int64_t>;

double planned_ms(int64_t seq_len, const std::vector<RankProfile>& profiles,
                  const ModelCost& cost = kAttention, Layout layout = Layout::kZigzag) {
  return slowest(make_plan(seq_len, profiles, cost, layout).rank_ms);
}

// [W] equal ranks at links of these bandwidths, in GB/s.
std::vector<RankProfile> at_links(const std::vector<double>& link_gbps) {
  std::vector<RankProfile> profiles(link_gbps.size());
  for (size_t rank = 0; rank < profiles.size(); ++rank) {
    profiles[rank].attention_tflops = 600.0;
    profiles[rank].linear_tflops = 650.0;
    profiles[rank].link_gbps = link_gbps[rank];
    profiles[rank].link_latency_us = 10.0;
  }
  return profiles;
}

// The same ring, with these ranks in it that may own nothing.
std::vector<RankProfile> without(std::vector<RankProfile> profiles, const Lengths& ranks) {
  for (const int64_t rank : ranks) profiles[rank].max_tokens = 0;
  return profiles;
}

}  // namespace

TEST_CASE("with links, few partitions of a short sequence are faster than the planned one") {
  std::mt19937 random(1);
  const auto between = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  int trials = 0, waited = 0, best_of_all = 0;
  double ratios = 0.0;
  while (trials < 400) {
    const size_t world_size = 2 + random() % 2;
    const int64_t seq_len = 10 + random() % (world_size == 2 ? 40 : 12);
    const double scale = static_cast<double>(seq_len);
    // Transfers and overheads in the order of what a few tokens take.
    const ModelCost cost{16.0, random() % 2 ? 8.0 * scale : 0.0, 8};
    std::vector<RankProfile> profiles(world_size);
    int64_t room = 0;
    for (RankProfile& profile : profiles) {
      profile.attention_tflops = between(0.05, 1.0);
      profile.linear_tflops = between(0.05, 1.0);
      if (random() % 2) profile.overhead_ms = between(0.05, 1.0) * 1e-8 * scale;
      if (random() % 4) profile.link_gbps = std::exp(between(-2.0, 2.5)) * 8 / scale;
      if (random() % 4 == 0) profile.max_tokens = seq_len / 2 + random() % seq_len;
      room += profile.max_tokens.value_or(seq_len);
    }
    if (room < seq_len) continue;
    ++trials;
    const Layout layout = random() % 2 ? Layout::kZigzag : Layout::kContiguous;
    const Workload workload{{random() % 4 != 0}, false};
    const Depth depth = random() % 3 ? Depth() : Depth(1);
    const Plan planned = ringattn::plan(seq_len, profiles, cost, layout, workload, depth);
    const double ms = slowest(planned.rank_ms);
    CHECK(planned.rank_ms == predict(planned.partition, profiles, cost, workload, depth));
    auto instant = profiles;
    for (RankProfile& profile : instant) profile.link_gbps = profile.link_latency_us = {};
    waited +=
        ms > 1.01 * slowest(ringattn::plan(seq_len, instant, cost, layout, workload, {}).rank_ms);
    const double best = least_predicted_ms(seq_len, 1, profiles, cost, layout, workload, depth);
    INFO("trial " << trials << ": " << seq_len << " tokens, " << world_size << " ranks");
    CHECK(ms < 1.05 * best);
    ratios += ms / best;
    best_of_all += ms <= best * (1 + 1e-9);
    for (size_t rank = 0; rank < world_size; ++rank) {
      const int64_t tokens = planned.partition.length(rank);
      CHECK(tokens <= profiles[rank].max_tokens.value_or(tokens));
    }
  }
  CHECK(waited > 100);  // or links have no part in this test
  CHECK(ratios / trials < 1.001);
  CHECK(best_of_all > 390);
}

TEST_CASE("a rank at a bad link is left out where it does not pay") {
  const auto profiles = at_links({200, 200, 200, 1.25});
  for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
    const double ms = planned_ms(1 << 14, profiles, kAttention, layout);
    CHECK(ms < 1.006 * planned_ms(1 << 14, without(profiles, {3}), kAttention, layout));
    // In whole tokens, three ranks take a third of it each.
    CHECK(ms < 1.006 * planned_ms(1 << 14, at_links({200, 200, 200}), kAttention, layout));
    // Wherever it stands.
    CHECK(planned_ms(1 << 14, at_links({1.25, 200, 200, 200}), kAttention, layout) < 1.01 * ms);
  }
  // Long enough, it pays.
  CHECK(planned_ms(1 << 20, profiles) < 0.9 * planned_ms(1 << 20, without(profiles, {3})));
  // Two ranks, and links that take longer than one of them alone.
  CHECK(planned_ms(1 << 13, at_links({5, 5})) <= planned_ms(1 << 13, at_links({5})));
}

TEST_CASE("no plan is slower than a rank alone, or than all but those at the worst links") {
  std::mt19937 random(2);
  for (int trial = 0; trial < 60; ++trial) {
    const size_t world_size = 2 + random() % 7;
    std::vector<double> link_gbps(world_size);
    for (double& gbps : link_gbps) gbps = std::exp(std::uniform_real_distribution<>(0, 5)(random));
    std::sort(link_gbps.begin(), link_gbps.end());
    const auto profiles = at_links(link_gbps);
    auto instant = profiles;
    for (RankProfile& profile : instant) profile.link_gbps = profile.link_latency_us = {};
    const int64_t seq_len = int64_t{1} << (12 + random() % 6);
    const double ms = planned_ms(seq_len, profiles);
    INFO("trial " << trial << ": " << seq_len << " tokens, " << world_size << " ranks");
    Lengths left_out;
    for (size_t worst = 0; worst < world_size; ++worst) {
      const Plan balanced = ringattn::plan(seq_len, without(instant, left_out), kAttention,
                                           Layout::kZigzag, {}, std::nullopt);
      CHECK(ms <= 1.01 * slowest(predict(balanced.partition, profiles, kAttention, {})));
      left_out.push_back(static_cast<int64_t>(worst));
    }
    CHECK(ms <= planned_ms(seq_len, at_links({link_gbps[0]})));
  }
}

TEST_CASE("of many ranks, no plan is much slower than the fast ones alone") {
  auto profiles = at_links({10, 10, 10, 10, 200, 200, 200, 200});
  for (size_t rank = 0; rank < profiles.size(); ++rank) {
    profiles[rank].attention_tflops = rank < 4 ? 700.0 : 80.0;
    profiles[rank].link_latency_us = {};
  }
  const std::vector<RankProfile> fast(profiles.begin(), profiles.begin() + 4);
  for (const int64_t seq_len : {1 << 15, 1 << 16}) {
    for (const bool causal : {true, false}) {
      INFO(seq_len << " tokens, causal: " << causal);
      const Workload workload = {{causal}, false};
      const Layout layout = Layout::kZigzag;
      const double ms = slowest(make_plan(seq_len, profiles, kAttention, layout, workload).rank_ms);
      const double alone = slowest(make_plan(seq_len, fast, kAttention, layout, workload).rank_ms);
      CHECK(ms <= 1.11 * alone);
    }
  }
}

TEST_CASE("ranks without tokens delay no other rank") {
  const auto all = at_links({5, 50, 20, 1, 50});
  const std::vector<RankProfile> owners = {all[0], all[2], all[4]};
  for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
    for (const bool causal : {true, false}) {
      for (const Depth depth : {Depth(1), Depth(2), Depth()}) {
        const Workload workload = {{causal}, false};
        const Partition some(layout, {9000, 0, 4000, 0, 7000}, {2, 1, 0, 3, 4});
        const Partition alone(layout, {9000, 4000, 7000}, {1, 0, 2});
        const auto ms = predict(some, all, kAttention, workload, depth);
        const auto ms_alone = predict(alone, owners, kAttention, workload, depth);
        CHECK(std::vector<double>{ms[0], ms[2], ms[4]} == ms_alone);
      }
    }
  }
}

TEST_CASE("a rank at a bad link that memory asks for lies where it costs least") {
  auto profiles = at_links({50, 50, 1});
  for (RankProfile& profile : profiles) {
    profile.max_tokens = 16000;
    profile.link_latency_us = {};
  }
  const Partition known(Layout::kZigzag, {12800, 13312, 6656});
  const double ms = slowest(predict(known, profiles, kAttention, {}));
  CHECK(planned_ms(1 << 15, profiles) <= 1.05 * ms);
}

TEST_CASE("unequal ranks leave even lengths for any gain") {
  // A limit makes the lengths even that would balance best without waits.
  auto profiles = at_links({5, 50});
  profiles[1].linear_tflops = 300.0;
  for (RankProfile& profile : profiles) {
    profile.attention_tflops = 600.0;
    profile.link_latency_us = {};
  }
  profiles[0].linear_tflops = 600.0;
  profiles[0].max_tokens = 32768;
  const ModelCost layer{16384.0, 436e6, 16384};
  const int64_t seq_len = 65536, depth = 1;
  const auto ms = [&](int64_t more) {
    return slowest(make_plan(seq_len + more, profiles, layer, Layout::kZigzag, {}, depth).rank_ms);
  };
  CHECK(ms(0) <= ms(1));
}

TEST_CASE("equal ranks at fast equal links keep equal lengths, whatever the latency") {
  for (const size_t world_size : {2, 3, 4, 8}) {
    for (const int64_t seq_len : {1 << 12, 1 << 13, 1 << 16}) {
      auto profiles = at_links(std::vector<double>(world_size, 200));
      for (RankProfile& profile : profiles) profile.link_latency_us = 60;
      const auto lengths = ringattn::plan(seq_len, profiles, kAttention, Layout::kZigzag, {}, {})
                               .partition.lengths();
      INFO(world_size << " ranks, " << seq_len << " tokens");
      const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
      CHECK(*most - *least <= 1);
    }
  }
}

TEST_CASE("tokens lie where they hide a wait") {
  // Equal ranks; the one that waits for the longer transfer owns less.
  const auto profiles = at_links({12, 12});
  const int64_t seq_len = 1 << 14;
  const auto even =
      predict(Partition(Layout::kZigzag, {seq_len / 2, seq_len / 2}), profiles, kAttention, {});
  const double alone = planned_ms(seq_len, at_links({12}));
  CHECK(planned_ms(seq_len, profiles) < 0.95 * std::min(slowest(even), alone));
}

TEST_CASE("a training step waits for blocks twice, and for gradients of twice their bytes") {
  // Two equal ranks whose links take far longer than attention: a block of 8192 tokens in both
  // passes, and its gradients.
  const auto profiles = at_links({0.1, 0.1});
  const Partition even(Layout::kContiguous, {1 << 13, 1 << 13});
  const double block_ms = (1 << 13) * 4096 / 0.1e6, hop_ms = 0.01;
  const double pairs_ms = kAttention.attention_flops * (1 << 26) / (600.0 * 1e9);
  const auto forward = predict(even, profiles, kAttention, {});
  const auto training = predict(even, profiles, kAttention, {{true}, true});
  // The second rank attends the first one's block when it is there. The first one waits for the
  // gradients, and before them, with nothing to attend, for the end of what it sends.
  CHECK(forward[1] == Approx(block_ms + hop_ms + pairs_ms).epsilon(1e-6));
  CHECK(training[1] == Approx(4 * block_ms + 3 * hop_ms + 3.5 * pairs_ms).epsilon(1e-6));
  CHECK(training[0] == Approx(training[1] - forward[1] + forward[0]).epsilon(1e-2));
}

TEST_CASE("padding of tiles hides transfers as other attention does") {
  // Of 129 rows, one is a tile of its own; 200 keys are computed as 256.
  auto profiles = at_links({1.0, 1.0});
  for (RankProfile& profile : profiles) profile.link_latency_us = {};
  const Partition two(Layout::kZigzag, {129, 200});
  const ringattn::Workload dense = {{false}, false};
  const auto waits = [&] {
    const auto ms = predict(two, profiles, kAttention, dense);
    auto instant = profiles;
    for (RankProfile& profile : instant) profile.link_gbps = {};
    return ms[0] - predict(two, instant, kAttention, dense)[0];
  };
  const double without_tiles = waits();
  for (RankProfile& profile : profiles) profile.tiles = {{128, 128, 128}};
  CHECK(without_tiles > 0.0);
  CHECK(waits() < without_tiles);
}

TEST_CASE("a plan with links is the same every time") {
  const auto profiles = at_links({40, 3, 200, 7, 90, 12, 1, 60});
  const auto first = ringattn::plan(1 << 15, profiles, kAttention, Layout::kZigzag, {}, {});
  const auto again = ringattn::plan(1 << 15, profiles, kAttention, Layout::kZigzag, {}, {});
  CHECK(first.partition.lengths() == again.partition.lengths());
  CHECK(first.partition.order() == again.partition.order());
  CHECK(first.rank_ms == again.rank_ms);
}
