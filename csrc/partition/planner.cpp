// SPDX-License-Identifier: Apache-2.0
#include "partition/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "partition/ring_simulation.h"

namespace ringattn {
namespace {

using Ranks = std::vector<int64_t>;  // an order of ranks, or tokens of each

// Coarser units are taken where they lose at most this share of the time to rounding.
constexpr double kUnitTolerance = 5e-3;
constexpr int64_t kUnits[] = {256, 64, 16};
constexpr int64_t kUnitsPerRank = 32;  // a unit is at most this part of the mean share

// Waits below this share of the time are none.
constexpr double kWaitTolerance = 1e-3;

// Up to so many ranks, all orders of a contiguous partition are looked at.
constexpr int64_t kMaxOrderedRanks = 8;
constexpr double kOrderTolerance = 1e-9;

// The time of one rank as a function of what it owns.
struct RankTime {
  double overhead_ms = 0.0;
  double token_ms = 0.0;
  double pair_ms = 0.0;  // 0 where the time does not depend on where the tokens lie
  int64_t max_tokens = 0;

  // Of `tokens` tokens after `before` others.
  double of(int64_t before, int64_t tokens) const {
    if (tokens == 0) return 0.0;
    const double n = static_cast<double>(tokens);
    return overhead_ms + n * (token_ms + pair_ms * (static_cast<double>(before) + n / 2));
  }

  // The inverse of that in real numbers: tokens that take `limit_ms`.
  double within(double before, double limit_ms) const {
    const double budget = limit_ms - overhead_ms;
    if (budget <= 0.0) return 0.0;
    const double slope = token_ms + pair_ms * before;
    return 2 * budget / (slope + std::sqrt(slope * slope + 2 * pair_ms * budget));
  }

  // The most of `left` tokens that take at most `limit_ms`: all there is room for, or a multiple of
  // `unit`.
  int64_t most(int64_t before, int64_t left, int64_t unit, double limit_ms) const {
    const int64_t room = std::min(max_tokens, left);
    if (of(before, room) <= limit_ms) return room;
    const double guess =
        std::min(within(static_cast<double>(before), limit_ms), static_cast<double>(room));
    int64_t tokens = static_cast<int64_t>(guess) / unit * unit;
    while (tokens > 0 && of(before, tokens) > limit_ms) tokens -= unit;
    while (tokens + unit <= room && of(before, tokens + unit) <= limit_ms) tokens += unit;
    return tokens;
  }
};

std::vector<RankTime> rank_times(int64_t seq_len, Layout layout,
                                 const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                 const Workload& workload) {
  std::vector<RankTime> times;
  for (const RankProfile& profile : profiles) {
    RankTime time;
    time.overhead_ms = profile.overhead_ms;
    time.max_tokens = profile.max_tokens.value_or(std::numeric_limits<int64_t>::max());
    const double attention = (workload.training ? 3.5 : 1.0) * cost.attention_flops /
                             (profile.attention_tflops * kFlopsPerMs);
    const double linear =
        (workload.training ? 3.0 : 1.0) * cost.linear_flops / (profile.linear_tflops * kFlopsPerMs);
    time.token_ms = linear;
    if (workload.causal && layout == Layout::kContiguous) {
      time.pair_ms = attention;
    } else {
      const double keys = static_cast<double>(seq_len) / (workload.causal ? 2 : 1);
      time.token_ms += keys * attention;
    }
    times.push_back(time);
  }
  return times;
}

std::vector<double> rank_ms(const Partition& partition, const std::vector<RankTime>& times) {
  std::vector<double> result(times.size());
  int64_t before = 0;
  for (const int64_t rank : partition.order()) {
    result[rank] = times[rank].of(before, partition.length(rank));
    before += partition.length(rank);
  }
  return result;
}

double slowest(const std::vector<double>& ms) { return *std::max_element(ms.begin(), ms.end()); }

// The least number above `low`, up to `high`, that is enough; `high` is. What is enough stays so.
template <typename Enough>
double least(double low, double high, double tolerance, const Enough& enough) {
  while (true) {
    const double middle = low + (high - low) / 2;
    if (!(low < middle && middle < high) || high - low <= tolerance * high) return high;
    (enough(middle) ? high : low) = middle;
  }
}

// One rank after the other takes what it can within `limit_ms`. The further the ranks before have
// come, the further comes the next: so no other lengths in this order come further.
Ranks fill(const std::vector<RankTime>& times, const Ranks& order, int64_t seq_len, int64_t unit,
           double limit_ms) {
  Ranks lengths(times.size());
  int64_t before = 0;
  for (const int64_t rank : order) {
    lengths[rank] = times[rank].most(before, seq_len - before, unit, limit_ms);
    before += lengths[rank];
  }
  return lengths;
}

int64_t total(const Ranks& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

// More than any rank takes for whatever it may be given.
double enough_for_all(const std::vector<RankTime>& times, int64_t seq_len) {
  double limit = 0.0;
  for (const RankTime& time : times) limit = std::max(limit, time.of(seq_len, seq_len));
  return limit;
}

// The lengths whose slowest rank is fastest, of all in this order and these units.
Ranks best_lengths(const std::vector<RankTime>& times, const Ranks& order, int64_t seq_len,
                   int64_t unit) {
  const auto filled = [&](double limit) { return fill(times, order, seq_len, unit, limit); };
  return filled(least(0.0, enough_for_all(times, seq_len), 0.0,
                      [&](double limit) { return total(filled(limit)) == seq_len; }));
}

Ranks fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len) {
  Ranks order(times.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return times[a].of(0, seq_len) < times[b].of(0, seq_len);
  });
  return order;
}

// The order in which ranks whose time depends on the tokens before them come furthest. By sets of
// ranks: how far a set can come is the furthest that any of its ranks comes after the others.
Ranks best_order(const std::vector<RankTime>& times, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(times.size());
  const Ranks sorted = fast_to_slow(times, seq_len);
  if (world_size > kMaxOrderedRanks) return sorted;

  const uint32_t all = (1u << world_size) - 1;
  std::vector<int64_t> reach(all + 1), last(all + 1);
  const auto fits = [&](double limit) {
    for (uint32_t set = 1; set <= all; ++set) {
      reach[set] = -1;
      for (int64_t rank = world_size - 1; rank >= 0; --rank) {
        if (!(set >> rank & 1)) continue;
        const int64_t before = reach[set ^ (1u << rank)];
        const int64_t end = before + times[rank].most(before, seq_len - before, 1, limit);
        if (end > reach[set]) {
          reach[set] = end;
          last[set] = rank;
        }
      }
    }
    return reach[all] == seq_len;
  };
  const auto filled = best_lengths(times, sorted, seq_len, 1);
  const double high = slowest(rank_ms(Partition(Layout::kContiguous, filled, sorted), times));
  const double limit = least(0.0, high, kOrderTolerance, fits);
  fits(limit);
  Ranks order(world_size);
  uint32_t set = all;
  for (int64_t place = world_size - 1; place >= 0; --place) {
    order[place] = last[set];
    set ^= 1u << last[set];
  }
  return order;
}

Ranks even_lengths(int64_t seq_len, int64_t world_size) {
  Ranks lengths(world_size, seq_len / world_size);
  for (int64_t rank = 0; rank < seq_len % world_size; ++rank) ++lengths[rank];
  return lengths;
}

bool has_room(const std::vector<RankTime>& times, const Ranks& lengths) {
  for (size_t rank = 0; rank < times.size(); ++rank) {
    if (lengths[rank] > times[rank].max_tokens) return false;
  }
  return true;
}

Partition best_partition(const std::vector<RankTime>& times, Layout layout, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(times.size());
  const bool placed = std::any_of(times.begin(), times.end(),
                                  [](const RankTime& time) { return time.pair_ms > 0.0; });
  const Ranks order = placed ? best_order(times, seq_len) : fast_to_slow(times, seq_len);
  const auto with = [&](const Ranks& lengths) {
    return Partition(layout, lengths, placed ? order : Ranks());
  };
  Partition best = with(best_lengths(times, order, seq_len, 1));
  const double limit = slowest(rank_ms(best, times)) * (1 + kUnitTolerance);
  for (const int64_t unit : kUnits) {
    if (unit * kUnitsPerRank * world_size > seq_len) continue;
    const Partition coarse = with(best_lengths(times, order, seq_len, unit));
    if (slowest(rank_ms(coarse, times)) <= limit) {
      best = coarse;
      break;
    }
  }
  const Partition even(layout, even_lengths(seq_len, world_size));
  const bool even_is_best = has_room(times, even.lengths()) &&
                            slowest(rank_ms(even, times)) <= slowest(rank_ms(best, times));
  return even_is_best ? even : best;
}

// The same in real numbers, without overheads and limits of memory, in the order of `partition`.
double ideal_ms(std::vector<RankTime> times, const Partition& partition) {
  const double seq_len = static_cast<double>(partition.seq_len());
  if (partition.seq_len() == 0) return 0.0;
  for (RankTime& time : times) time.overhead_ms = 0.0;
  return least(0.0, enough_for_all(times, partition.seq_len()), 0.0, [&](double limit) {
    double before = 0.0;
    for (const int64_t rank : partition.order()) before += times[rank].within(before, limit);
    return before >= seq_len;
  });
}

// Largest, smallest, second largest, second smallest, ...: no two slow ranks side by side.
Ranks alternating(const Ranks& lengths) {
  Ranks sorted(lengths.size()), order;
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  for (size_t first = 0, last = sorted.size(); first < last;) {
    order.push_back(sorted[first++]);
    if (first < last) order.push_back(sorted[--last]);
  }
  return order;
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
    room += std::min(num_tokens, profile.max_tokens.value_or(num_tokens));
  }
  if (room < num_tokens) {
    throw std::invalid_argument("profiles must have max_tokens for all " +
                                std::to_string(num_tokens) + " tokens, got room for " +
                                std::to_string(room));
  }
}

// How long attention of each rank stands still for blocks.
std::vector<double> waits_ms(const Partition& partition, const std::vector<RankProfile>& profiles,
                             const ModelCost& cost, bool causal, int64_t depth) {
  std::vector<RankProfile> instant = profiles;
  for (RankProfile& profile : instant) profile.link_gbps = profile.link_latency_us = {};
  // With all blocks ahead and nothing in their way, nobody waits.
  const auto busy = simulate_ring(partition, instant, cost, causal, partition.world_size());
  auto waits = simulate_ring(partition, profiles, cost, causal, depth);
  for (size_t rank = 0; rank < waits.size(); ++rank) {
    waits[rank] = std::max(0.0, waits[rank] - busy[rank]);
  }
  return waits;
}

}  // namespace

std::vector<double> predict(const Partition& partition, const std::vector<RankProfile>& profiles,
                            const ModelCost& cost, const Workload& workload) {
  if (static_cast<int64_t>(profiles.size()) != partition.world_size()) {
    throw std::invalid_argument("profiles must be " + std::to_string(partition.world_size()) +
                                ", one for each rank of the partition, got " +
                                std::to_string(profiles.size()));
  }
  return rank_ms(partition,
                 rank_times(partition.seq_len(), partition.layout(), profiles, cost, workload));
}

Plan plan(int64_t seq_len, const std::vector<RankProfile>& profiles, const ModelCost& cost,
          Layout layout, const Workload& workload, std::optional<int64_t> depth) {
  check(seq_len, profiles, "seq_len");
  if (depth && *depth < 1) {
    throw std::invalid_argument("depth must be at least 1, got " + std::to_string(*depth));
  }
  const auto times = rank_times(seq_len, layout, profiles, cost, workload);
  const Partition chosen = best_partition(times, layout, seq_len);

  std::vector<Partition> orders = {chosen};
  if (layout == Layout::kZigzag) {
    orders.emplace_back(layout, chosen.lengths(), alternating(chosen.lengths()));
  }
  const int64_t deepest = std::max<int64_t>(1, chosen.world_size() - 1);
  const auto ring_ms = [&](const Partition& partition, int64_t at) {
    return slowest(simulate_ring(partition, profiles, cost, workload.causal, at));
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
  const double fastest = quickest(deepest).second;
  int64_t least_depth = 1;
  while (quickest(least_depth).second > fastest * (1 + kWaitTolerance)) ++least_depth;

  const int64_t used = std::min(depth.value_or(deepest), deepest);
  const Partition& partition = *quickest(std::min(used, least_depth)).first;
  Plan plan{partition, used, least_depth, rank_ms(partition, times), ideal_ms(times, partition),
            {}};
  const auto waits = waits_ms(partition, profiles, cost, workload.causal, used);
  for (size_t rank = 0; rank < waits.size(); ++rank) plan.rank_ms[rank] += waits[rank];
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    plan.memory_bytes.push_back(cost.kv_bytes *
                                buffered_tokens(partition, rank, workload.causal, used));
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
