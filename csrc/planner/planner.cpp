// SPDX-License-Identifier: Apache-2.0
#include "planner/planner.h"

#include <algorithm>
#include <limits>
#include <ranges>
#include <stdexcept>
#include <string>

#include "planner/granularity.h"
#include "planner/ring_simulation.h"
#include "planner/time_model.h"
#include "planner/water_filling.h"

namespace ringattn {
namespace {

// Waits below this share of the time count as none.
constexpr double kWaitTolerance = 1e-3;
// Lengths must gain so much over even ones where those are the best without padding and waits of
// ranks with equal speeds: both are known less well than speeds.
constexpr double kMinGainOfEqualRanks = 0.1;
// The same for other ranks with tiles; less is within the model's error.
constexpr double kMinGainInTiles = 1e-2;
// Under a window a contiguous rank fetches half as many rows as a zigzag one, but the first ranks,
// whose tokens see fewer keys, own more tokens: up to so many times those of zigzag.
constexpr double kMaxMoreTokens = 1.1;

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

void check(int64_t num_tokens, const std::vector<RankProfile>& profiles, const char* argument) {
  if (profiles.empty())
    throw std::invalid_argument("profiles must name at least one rank, got none");
  if (num_tokens < 0) {
    throw std::invalid_argument(std::string(argument) + " must not be negative, got " +
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

// What a plan has to gain over even lengths, where `filled` are those that end together without
// padding and waits.
double min_gain_over_even(const TimeModel& model, const Partition& filled) {
  const std::vector<RankTime>& times = model.ranks();
  const Partition even(model.layout(), even_lengths(model.seq_len(), model.world_size()));
  const bool equal = std::all_of(times.begin(), times.end(), [&](const RankTime& time) {
    return time.token_ms == times[0].token_ms && time.pair_ms == times[0].pair_ms;
  });
  const bool ends_together = slowest(smooth_ms(even, times)) <= slowest(smooth_ms(filled, times));
  if (equal && ends_together) return kMinGainOfEqualRanks;
  return model.has_tiles() ? kMinGainInTiles : 0.0;
}

// `best`, or even lengths, in its order or the default one, where `best` takes more than
// 1 - `min_gain` of their time.
template <typename Ms>
Partition prefer_even(const Partition& best, const std::vector<RankTime>& times, double min_gain,
                      const Ms& slowest_ms) {
  const Lengths lengths = even_lengths(best.seq_len(), best.world_size());
  if (!has_room(times, lengths)) return best;
  const Partition in_order(best.layout(), lengths, best.order()), by_rank(best.layout(), lengths);
  const Partition& even = slowest_ms(by_rank) < slowest_ms(in_order) ? by_rank : in_order;
  return slowest_ms(even) * (1 - min_gain) > slowest_ms(best) ? best : even;
}

// How many blocks are in flight, of the `depth` that may be.
int64_t depth_used(std::optional<int64_t> depth, int64_t world_size) {
  const int64_t deepest = std::max<int64_t>(1, world_size - 1);
  return std::min(depth.value_or(deepest), deepest);
}

// The first of these partitions that is as fast as any at this depth.
const Partition& fastest(const std::vector<Partition>& partitions, const TimeModel& model,
                         int64_t depth) {
  const Partition* best = nullptr;
  double best_ms = std::numeric_limits<double>::infinity();
  for (const Partition& partition : partitions) {
    const double ms = slowest(model.step_ms(partition, depth, best_ms));
    if (ms * (1 + kWaitTolerance) >= best_ms) continue;
    best = &partition;
    best_ms = ms;
  }
  return *best;
}

// The least depth at which a partition is as fast as at `deepest`.
int64_t find_min_depth(const Partition& partition, const TimeModel& model, int64_t deepest) {
  const auto ms = [&](int64_t depth) { return slowest(model.step_ms(partition, depth)); };
  const double enough_ms = ms(deepest) * (1 + kWaitTolerance);
  const auto shallower = std::views::iota(int64_t{1}, deepest);  // more blocks take no longer
  const auto waits = [&](int64_t depth) { return ms(depth) > enough_ms; };
  return 1 + (std::ranges::partition_point(shallower, waits) - shallower.begin());
}

// Lengths that end together without waits and padding; under zigzag, where the order costs nothing
// by itself, in two orders.
std::vector<Partition> balanced(const TimeModel& model) {
  std::vector<Partition> orders = {fill_ranks(model)};
  if (model.layout() == Layout::kZigzag) {
    orders.push_back(fill_ranks_in(model, alternating(orders[0].lengths())));
  }
  return orders;
}

// The same ranks in the reverse order.
Partition reversed(const Partition& partition, const TimeModel& model) {
  return fill_ranks_in(model, RankOrder(partition.order().rbegin(), partition.order().rend()));
}

// The fastest partition without the k ranks with the slowest links, or without the k slowest ranks,
// for k from 1 on.
Partition leave_out_ranks(const TimeModel& whole, int64_t depth) {
  const int64_t seq_len = whole.seq_len();
  std::vector<Partition> partitions;
  RankOrder ranks = fast_to_slow(whole.ranks(), seq_len);
  for (const bool by_link : {false, true}) {
    if (by_link) {
      std::stable_sort(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) {
        return whole.link_ms(a, seq_len) < whole.link_ms(b, seq_len);
      });
    }
    TimeModel model = whole;
    for (auto rank = ranks.rbegin(); rank + 1 != ranks.rend(); ++rank) {
      model = model.without_rank(*rank);
      for (const Partition& partition : balanced(model)) {
        partitions.push_back(partition);
        partitions.push_back(reversed(partition, model));
      }
    }
  }
  return fastest(partitions, whole, depth);
}

// Moves tokens between ranks where some may wait or have tiles to fill; elsewhere nothing is faster
// than `filled`.
Partition reduce_waits_and_padding(const std::vector<Partition>& filled, const TimeModel& model,
                                   int64_t depth) {
  int64_t min_depth = depth;  // of orders that are as fast, the one that needs no more is taken
  for (const Partition& in : filled) {
    min_depth = std::min(min_depth, find_min_depth(in, model, depth));
  }
  std::vector<Partition> starts = {fastest(filled, model, min_depth)};
  if (model.may_wait(depth)) {
    starts.push_back(reversed(starts[0], model));
    starts.push_back(leave_out_ranks(model, depth));
  } else if (!model.has_tiles()) {
    return starts[0];
  }
  return fastest(improve_lengths(starts, model, depth), model, depth);
}

// Tokens whose keys and values a rank holds beside its shard, gradients counted by their bytes. A
// backward holds all visiting blocks.
int64_t held_tokens(const Partition& partition, int64_t rank, const TimeModel& model,
                    int64_t depth) {
  const Mask& mask = model.mask();
  if (!model.training()) return buffered_tokens(partition, rank, mask, depth);
  const int64_t all = depth_used({}, model.world_size());
  return buffered_tokens(partition, rank, mask, all) +
         kGradientBytes * gradient_tokens(partition, rank, mask);
}

// What a partition takes and needs.
Plan describe(const Partition& partition, const TimeModel& model, int64_t depth, int64_t kv_bytes) {
  const std::vector<double> rank_ms = model.step_ms(partition, depth);
  // With short segments, tiles of another kind than the first can have less masked work than the
  // model assumes.
  const double ideal = std::min(ideal_ms(model), slowest(rank_ms));
  Plan plan{partition, depth, find_min_depth(partition, model, depth), rank_ms, ideal, {}};
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    plan.memory_bytes.push_back(kv_bytes * held_tokens(partition, rank, model, depth));
  }
  return plan;
}

Plan plan_in(const TimeModel& whole, std::optional<int64_t> depth, int64_t kv_bytes) {
  const TimeModel compared = whole.without_latency(), model = compared.for_lengths();
  const int64_t used = depth_used(depth, model.world_size());
  const std::vector<Partition> filled = balanced(model);
  const Partition improved = reduce_waits_and_padding(filled, model, used);
  const auto prefer_even_in = [used](const TimeModel& in, const Partition& best, double min_gain) {
    return prefer_even(best, in.ranks(), min_gain,
                       [&](const Partition& some) { return slowest(in.step_ms(some, used)); });
  };
  Partition chosen = prefer_even_in(model, improved, min_gain_over_even(model, filled[0]));
  if (whole.training()) chosen = prefer_even_in(compared, chosen, 0.0);
  return describe(chosen, whole, used, kv_bytes);
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
  const TimeModel model(partition.seq_len(), partition.layout(), profiles, cost, workload);
  return model.step_ms(partition, depth_used(depth, partition.world_size()));
}

Plan plan(int64_t seq_len, const std::vector<RankProfile>& profiles, const ModelCost& cost,
          std::optional<Layout> layout, const Workload& workload, std::optional<int64_t> depth) {
  check(seq_len, profiles, "seq_len");
  check_depth(depth);
  const auto planned = [&](Layout in) {
    return plan_in(TimeModel(seq_len, in, profiles, cost, workload), depth, cost.kv_bytes);
  };
  if (layout) return planned(*layout);
  if (workload.mask.is_plain()) return planned(Layout::kZigzag);
  if (!workload.mask.cu_seqlens.empty()) return planned(Layout::kContiguous);
  const Plan zigzag = planned(Layout::kZigzag), contiguous = planned(Layout::kContiguous);
  const double zigzag_ms = slowest(zigzag.rank_ms), contiguous_ms = slowest(contiguous.rank_ms);
  if (zigzag_ms * (1 + kWaitTolerance) < contiguous_ms) return zigzag;
  if (contiguous_ms * (1 + kWaitTolerance) < zigzag_ms) return contiguous;
  const auto longest = [](const Plan& some) {
    const Lengths& lengths = some.partition.lengths();
    return static_cast<double>(*std::max_element(lengths.begin(), lengths.end()));
  };
  return longest(contiguous) <= kMaxMoreTokens * longest(zigzag) ? contiguous : zigzag;
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
  const Partition best(Layout::kContiguous,
                       best_lengths(times, fast_to_slow(times, num_tokens), num_tokens, 1));
  const auto slowest_ms = [&](const Partition& some) { return slowest(smooth_ms(some, times)); };
  return prefer_even(best, times, 0.0, slowest_ms).lengths();
}

}  // namespace ringattn
