// SPDX-License-Identifier: Apache-2.0
#include "planner/planner.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/balance.h"
#include "planner/link_search.h"
#include "planner/ring_simulation.h"
#include "planner/tiles.h"

namespace ringattn {
namespace {

// Waits below this share of the time count as none.
constexpr double kWaitTolerance = 1e-3;
// Lengths in tiles must gain more than this over even ones; less is within the model's error.
constexpr double kMinGainOfUnequal = 1e-2;

void check_tiles(const RankProfile& profile) {
  for (const AttentionTile& tile : profile.tiles) {
    const AttentionTile& first = profile.tiles.front();
    const auto pairs_in = [](const AttentionTile& some, int time) {
      return int64_t{some.rows} * some.keys * time;
    };
    const bool is_one =
        std::min({tile.rows, tile.keys, tile.rows_per_warpgroup, tile.relative_cost}) >= 1 &&
        tile.rows % std::max(tile.rows_per_warpgroup, 1) == 0 && tile.overhead_keys >= 0;
    // Speeds are in whole ones of the first kind: with a faster one, times could be negative.
    if (is_one && pairs_in(first, tile.relative_cost) >= pairs_in(tile, first.relative_cost))
      continue;
    throw std::invalid_argument(
        "tiles must have rows in equal parts, keys and a time, the fastest first, got " +
        std::to_string(tile.rows) + " rows in parts of " + std::to_string(tile.rows_per_warpgroup) +
        ", " + std::to_string(tile.keys) + " and " + std::to_string(tile.overhead_keys) +
        " keys, time " + std::to_string(tile.relative_cost));
  }
}

void check(int64_t num_tokens, const std::vector<RankProfile>& profiles, const char* tokens) {
  if (profiles.empty())
    throw std::invalid_argument("profiles must name at least one rank, got none");
  if (num_tokens < 0) {
    throw std::invalid_argument(std::string(tokens) + " must not be negative, got " +
                                std::to_string(num_tokens));
  }
  int64_t room = 0;
  for (const RankProfile& profile : profiles) {
    check_tiles(profile);
    room += std::min(num_tokens - room, profile.max_tokens.value_or(num_tokens));
  }
  if (room < num_tokens) {
    throw std::invalid_argument("profiles must have max_tokens for all " +
                                std::to_string(num_tokens) + " tokens, got room for " +
                                std::to_string(room));
  }
}

void check_depth(std::optional<int64_t> depth) {
  if (depth && *depth < 1) {
    throw std::invalid_argument("depth must be positive, got " + std::to_string(*depth));
  }
}

// `partition`, or even lengths in its order or in rank order, where `partition` gains too little
// over these.
Partition even_where_as_good(const Partition& partition, const RingProblem& problem) {
  const Ranks even = even_lengths(partition.seq_len(), partition.world_size());
  if (!in_tiles(problem.profiles) || partition.lengths() == even ||
      !has_room(problem.times, even)) {
    return partition;
  }
  Ranks rank_order(even.size());
  std::iota(rank_order.begin(), rank_order.end(), 0);
  Partition best = partition;
  double enough_ms = slowest(problem.rank_ms(partition)) / (1 - kMinGainOfUnequal);
  for (const Ranks& order : {partition.order(), rank_order}) {
    const Partition in_order(partition.layout(), even, order);
    const double ms = slowest(problem.rank_ms(in_order));
    if (ms > enough_ms) continue;
    enough_ms = ms;
    best = in_order;
  }
  return best;
}

// How many blocks are in flight, of the `depth` that may be.
int64_t depth_used(std::optional<int64_t> depth, int64_t world_size) {
  const int64_t deepest = std::max<int64_t>(1, world_size - 1);
  return std::min(depth.value_or(deepest), deepest);
}

}  // namespace

std::vector<double> predict(const Partition& partition, const std::vector<RankProfile>& profiles,
                            const ModelCost& cost, const Workload& workload,
                            std::optional<int64_t> depth) {
  check_depth(depth);
  if (static_cast<int64_t>(profiles.size()) != partition.world_size()) {
    throw std::invalid_argument("profiles must be " + std::to_string(partition.world_size()) +
                                ", one for each rank of the partition, got " +
                                std::to_string(profiles.size()));
  }
  for (const RankProfile& profile : profiles) check_tiles(profile);
  const auto times = rank_times(partition.seq_len(), partition.layout(), profiles, cost, workload);
  const RingProblem problem{times, profiles, cost, workload,
                            depth_used(depth, partition.world_size())};
  return problem.rank_ms(partition);
}

Plan plan(int64_t seq_len, const std::vector<RankProfile>& profiles, const ModelCost& cost,
          Layout layout, const Workload& workload, std::optional<int64_t> depth) {
  check(seq_len, profiles, "seq_len");
  check_depth(depth);
  const auto times = rank_times(seq_len, layout, profiles, cost, workload);
  const Partition chosen =
      fill_tiles(best_partition(times, layout, seq_len), times, profiles, cost, workload);

  std::vector<Partition> orders = {chosen};
  if (layout == Layout::kZigzag) {
    orders.emplace_back(layout, chosen.lengths(), alternating(chosen.lengths()));
  }
  const int64_t deepest = depth_used({}, chosen.world_size());
  const auto ring_ms = [&](const Partition& partition, int64_t at) {
    return slowest(RingProblem{times, profiles, cost, workload, at}.rank_ms(partition));
  };
  // The first order that is as fast as any at this depth, and how fast that is.
  const auto quickest = [&](int64_t at) {
    std::pair<const Partition*, double> best = {&orders[0], ring_ms(orders[0], at)};
    for (const Partition& partition : orders) {
      const double ms = ring_ms(partition, at);
      if (ms * (1 + kWaitTolerance) < best.second) best = {&partition, ms};
    }
    return best;
  };
  const auto find_min_depth = [&] {
    const double fastest = quickest(deepest).second;
    int64_t found = 1;
    while (quickest(found).second > fastest * (1 + kWaitTolerance)) ++found;
    return found;
  };
  int64_t min_depth = find_min_depth();
  const int64_t used = depth_used(depth, chosen.world_size());
  const RingProblem problem{times, profiles, cost, workload, used};
  Partition partition = *quickest(std::min(used, min_depth)).first;
  // Latencies move no tokens: a single hop, which is what is measured, has more latency than a
  // block that follows others in a ring, and a plan must not become slower than the even one by it.
  std::vector<RankProfile> prompt = profiles;
  for (RankProfile& profile : prompt) profile.link_latency_us = {};
  const RingProblem without_latency{times, prompt, cost, workload, used};
  const double with_waits_ms = slowest(without_latency.rank_ms(partition));
  // Where no rank waits, nothing is faster than the chosen lengths.
  if (with_waits_ms > slowest(problem.busy_ms(partition)) * (1 + kWaitTolerance)) {
    const Partition found = search_with_links(partition, without_latency);
    const bool is_even = partition.lengths() == even_lengths(seq_len, partition.world_size());
    const double wanted = is_even && are_equal(times) ? 1 - kMinGainOverEven : 1.0;
    if (slowest(without_latency.rank_ms(found)) < wanted * with_waits_ms) {
      partition = found;
      orders = {partition};
      min_depth = find_min_depth();
    }
  }
  // Last, since the search above leaves even lengths of equal ranks only for a gain of a tenth.
  const Partition settled = even_where_as_good(partition, without_latency);
  if (settled.lengths() != partition.lengths()) {
    partition = settled;
    orders = {partition};
    min_depth = find_min_depth();
  }
  const auto rank_ms = problem.rank_ms(partition);
  // With short segments, tiles of another kind than the first can have less masked work than the
  // model assumes.
  const double ideal = std::min(ideal_ms(times, chosen), slowest(rank_ms));
  Plan plan{partition, used, min_depth, rank_ms, ideal, {}};
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    plan.memory_bytes.push_back(cost.kv_bytes *
                                buffered_tokens(partition, rank, workload.mask, used));
  }
  return plan;
}

std::vector<int64_t> plan_cache(int64_t num_tokens, const std::vector<RankProfile>& profiles,
                                const ModelCost& cost) {
  check(num_tokens, profiles, "num_tokens");
  std::vector<RankTime> times;
  for (size_t rank = 0; rank < profiles.size(); ++rank) {
    const RankProfile& profile = profiles[rank];
    if (profile.memory_gbps.has_value() != profiles[0].memory_gbps.has_value()) {
      throw std::invalid_argument(
          "profiles must have memory_gbps for all ranks or none, got rank " + std::to_string(rank) +
          " unlike rank 0");
    }
    RankTime time;
    time.token_ms = static_cast<double>(cost.kv_bytes) / (profile.memory_gbps.value_or(1.0) * 1e6);
    time.max_tokens = profile.max_tokens.value_or(num_tokens);
    times.push_back(time);
  }
  const auto best = best_lengths(times, fast_to_slow(times, num_tokens), num_tokens, 1);
  const Ranks even = even_lengths(num_tokens, static_cast<int64_t>(profiles.size()));
  const auto ms = [&](const Ranks& lengths) {
    return slowest(rank_ms(Partition(Layout::kContiguous, lengths), times));
  };
  return has_room(times, even) && ms(even) <= ms(best) ? even : best;
}

}  // namespace ringattn
