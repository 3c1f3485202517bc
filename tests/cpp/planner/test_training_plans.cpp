// SPDX-License-Identifier: Apache-2.0
// Steps of training: in a backward, ranks wait for gradients that others compute.
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "catch.h"
#include "planner/planner.h"
#include "planning.h"

using ringattn::Layout;
using ringattn::ModelCost;
using ringattn::Partition;
using ringattn::Plan;
using ringattn::RankProfile;
using ringattn::Segment;
using ringattn::testing::kLayer;
using ringattn::testing::kLayouts;
using ringattn::testing::Lengths;
using ringattn::testing::make_plan;
using ringattn::testing::slowest;
using ringattn::testing::with_speeds;

namespace {

// The events of a backward, each computed from those before it. Steps are 1 .. W - 1, then the own
// block, step W. Messages are the blocks 1 .. W - 1, then as many gradients, all in one round.
class Backward {
 public:
  // attention_ms: [W], of a forward.
  Backward(const Partition& partition, const std::vector<RankProfile>& profiles, int64_t kv_bytes,
           const std::vector<double>& attention_ms, bool causal)
      : partition_(partition),
        profiles_(profiles),
        kv_bytes_(static_cast<double>(kv_bytes)),
        attention_ms_(attention_ms),
        causal_(causal),
        world_size_(partition.world_size()) {
    for (const int64_t rank : partition.order()) {
      if (partition.length(rank) > 0) ring_.push_back(rank);
    }
  }

  double end_ms(int64_t rank) {
    return std::max(attended(rank, world_size_), moved(rank, 2 * (world_size_ - 1)));
  }

 private:
  Lengths positions(int64_t rank) const {
    Lengths positions;
    for (const Segment& segment : partition_.segments(rank)) {
      for (int64_t at = segment.begin; at < segment.end; ++at) positions.push_back(at);
    }
    return positions;
  }

  // Of the block of a step; -1 where there is none. Ranks without tokens are not in the ring.
  int64_t owner(int64_t rank, int64_t step) const {
    if (step == world_size_) return rank;
    const int64_t size = static_cast<int64_t>(ring_.size());
    const int64_t place = std::find(ring_.begin(), ring_.end(), rank) - ring_.begin();
    return place < size && step < size ? ring_[(place + size - step) % size] : -1;
  }

  // Pairs of a query and a key that it sees, and the keys.
  std::pair<double, double> seen(int64_t rank, int64_t step) const {
    int64_t pairs = 0;
    std::set<int64_t> keys;
    if (owner(rank, step) < 0) return {0.0, 0.0};
    for (const int64_t query : positions(rank)) {
      for (const int64_t key : positions(owner(rank, step))) {
        if (causal_ && key > query) continue;
        ++pairs;
        keys.insert(key);
      }
    }
    return {static_cast<double>(pairs), static_cast<double>(keys.size())};
  }

  double link_ms(int64_t rank, double bytes) const {
    const RankProfile& profile = profiles_[rank];
    return profile.link_latency_us.value_or(0.0) / 1e3 +
           (profile.link_gbps ? bytes / (*profile.link_gbps * 1e6) : 0.0);
  }

  double once(const char* event, int64_t rank, int64_t index, const std::function<double()>& ms) {
    const auto key = std::make_tuple(std::string(event), rank, index);
    if (known_.count(key) == 0) known_[key] = ms();
    return known_[key];
  }

  // When a rank has attended to the block of a step.
  double attended(int64_t rank, int64_t step) {
    if (step == 0) return 0.0;
    return once("attended", rank, step, [&] {
      double all_pairs = 0.0;
      for (int64_t any = 1; any <= world_size_; ++any) all_pairs += seen(rank, any).first;
      const double share = all_pairs > 0.0 ? seen(rank, step).first / all_pairs : 0.0;
      return began(rank, step) + 2.5 * attention_ms_[rank] * share;
    });
  }

  double began(int64_t rank, int64_t step) {
    const int64_t needs = step == 1 ? std::min<int64_t>(1, world_size_ - 1) : world_size_ - 1;
    return std::max(attended(rank, step - 1), moved(rank, needs));
  }

  // When a rank has sent and received its messages up to this one.
  double moved(int64_t rank, int64_t message) {
    if (message == 0) return 0.0;
    return once("moved", rank, message, [&] {
      const int64_t blocks = world_size_ - 1;
      const int64_t step = message > blocks ? message - blocks : message;
      double end = moved(rank, message - 1);
      for (int64_t reader = 0; reader < world_size_; ++reader) {
        const int64_t source = owner(reader, step);
        const auto [pairs, keys] = seen(reader, step);
        if (pairs == 0.0 || (reader != rank && source != rank)) continue;
        const double bytes = (message > blocks ? 2.0 : 1.0) * kv_bytes_ * keys;
        double start = 0.0;
        for (const int64_t side : {reader, source}) {
          start = std::max(start, moved(side, message - 1));
          if (message > blocks) start = std::max(start, attended(side, step));
        }
        end = std::max(end, start + std::max(link_ms(reader, bytes), link_ms(source, bytes)));
      }
      return end;
    });
  }

  const Partition& partition_;
  const std::vector<RankProfile>& profiles_;
  const double kv_bytes_;
  const std::vector<double>& attention_ms_;
  const bool causal_;
  const int64_t world_size_;
  Lengths ring_;
  std::map<std::tuple<std::string, int64_t, int64_t>, double> known_;
};

std::vector<RankProfile> uneven(std::mt19937& random, size_t world_size) {
  const auto between = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  std::vector<double> speeds(world_size);
  for (double& speed : speeds) speed = between(0.1, 1.0);
  auto profiles = with_speeds(speeds);
  for (RankProfile& profile : profiles) {
    profile.linear_tflops *= between(0.7, 1.3);
    if (random() % 3 == 0) profile.overhead_ms = between(0.0, 0.1);
  }
  return profiles;
}

}  // namespace

TEST_CASE("a step of training takes a forward, products, and the events of its backward") {
  std::mt19937 random(1);
  int waited = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const size_t world_size = 1 + trial % 4;
    const Layout layout = kLayouts[trial / 4 % 2];
    const bool causal = random() % 4 != 0;
    auto profiles = uneven(random, world_size);
    const bool links = random() % 2;
    Lengths lengths(world_size), order(world_size);
    for (size_t rank = 0; rank < world_size; ++rank) {
      if (links) profiles[rank].link_gbps = static_cast<double>(1 + random() % 100);
      if (links) profiles[rank].link_latency_us = 1e-3 * static_cast<double>(random() % 3);
      lengths[rank] = random() % 5 ? random() % 20 : 0;
    }
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    // Attention and transfers of a few rows have about the same weight.
    const ModelCost cost{1e5, 1e6, 8};
    const Partition partition(layout, lengths, order);
    auto bare = profiles;
    for (RankProfile& profile : bare) {
      profile.overhead_ms = 0.0;
      profile.link_gbps = profile.link_latency_us = {};
    }
    const ModelCost attention{cost.attention_flops, 0.0, 0}, products{1e-300, cost.linear_flops, 0};
    const auto attention_ms = predict(partition, bare, attention, {{causal}, false});
    const auto products_ms = predict(partition, bare, products, {{causal}, false});
    const auto forward = predict(partition, profiles, cost, {{causal}, false});
    const auto training = predict(partition, profiles, cost, {{causal}, true});
    Backward backward(partition, profiles, cost.kv_bytes, attention_ms, causal);
    INFO("trial " << trial << ": " << world_size << " ranks");
    for (size_t rank = 0; rank < world_size; ++rank) {
      const double end = backward.end_ms(static_cast<int64_t>(rank));
      CHECK(training[rank] == Approx(forward[rank] + 2 * products_ms[rank] + end).epsilon(1e-9));
      waited += !links && end > 2.5 * attention_ms[rank] * 1.01;
    }
  }
  CHECK(waited > 100);  // or gradients have no part in this test
}

TEST_CASE("equal ranks and one slow one hardly wait for gradients under zigzag") {
  for (const size_t world_size : {2, 3, 4, 8}) {
    for (const double speed : {1.0, 0.9, 0.5, 0.1}) {
      std::vector<double> speeds(world_size, 1.0);
      speeds[world_size / 2] = speed;
      const auto profiles = with_speeds(speeds);
      const Plan planned = make_plan(1 << 17, profiles, kLayer, Layout::kZigzag, {{true}, true});
      INFO(world_size << " ranks, one at " << speed);
      CHECK(slowest(planned.rank_ms) <= 1.005 * planned.ideal_ms);
    }
  }
}
