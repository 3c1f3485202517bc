// SPDX-License-Identifier: Apache-2.0
#include "planner/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ringattn {
namespace {

constexpr int64_t kUnits[] = {256, 64, 16};
constexpr int64_t kUnitsPerRank = 32;  // a unit is at most this fraction of the mean share

// Up to so many ranks, all orders of a contiguous partition are tried.
constexpr int64_t kMaxOrderedRanks = 8;
constexpr double kOrderTolerance = 1e-9;  // relative gain of an order

// The smallest number in (0, high] that is enough, by bisection. `enough` is monotonic, and true
// for `high`.
template <typename Enough>
double smallest(double high, const Enough& enough) {
  double low = 0.0;
  while (true) {
    const double middle = low + (high - low) / 2;
    if (!(low < middle && middle < high)) return high;
    (enough(middle) ? high : low) = middle;
  }
}

// Greedy: one rank after the other takes as many tokens as it can within `limit_ms`. The more
// tokens precede a rank, the further it ends, so no other lengths in this order cover more tokens.
Ranks greedy_fill(const std::vector<RankTime>& times, const Ranks& order, int64_t seq_len,
                  int64_t unit, double limit_ms) {
  Ranks lengths(times.size());
  int64_t before = 0;
  for (const int64_t rank : order) {
    lengths[rank] = times[rank].max_tokens_within(before, seq_len - before, unit, limit_ms);
    before += lengths[rank];
  }
  return lengths;
}

int64_t total(const Ranks& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

// An upper bound of the time of any rank for any number of tokens.
double enough_for_all(const std::vector<RankTime>& times, int64_t seq_len) {
  double limit = 0.0;
  for (const RankTime& time : times) limit = std::max(limit, time.time_ms(seq_len, seq_len));
  return limit;
}

}  // namespace

double RankTime::time_ms(int64_t before, int64_t tokens) const {
  if (tokens == 0) return 0.0;
  const double n = static_cast<double>(tokens);
  return overhead_ms + n * (token_ms + pair_ms * (static_cast<double>(before) + n / 2));
}

double RankTime::tokens_within(double before, double limit_ms) const {
  const double budget = limit_ms - overhead_ms;
  if (budget <= 0.0) return 0.0;
  const double slope = token_ms + pair_ms * before;
  return 2 * budget / (slope + std::sqrt(slope * slope + 2 * pair_ms * budget));
}

int64_t RankTime::max_tokens_within(int64_t before, int64_t left, int64_t unit,
                                    double limit_ms) const {
  const int64_t room = std::min(max_tokens, left);
  if (time_ms(before, room) <= limit_ms) return room;
  const double guess =
      std::min(tokens_within(static_cast<double>(before), limit_ms), static_cast<double>(room));
  int64_t tokens = static_cast<int64_t>(guess) / unit * unit;
  while (tokens > 0 && time_ms(before, tokens) > limit_ms) tokens -= unit;
  while (tokens + unit <= room && time_ms(before, tokens + unit) <= limit_ms) tokens += unit;
  return tokens;
}

double attention_flops(const ModelCost& cost, const Workload& workload) {
  return (workload.training ? 3.5 : 1.0) * cost.attention_flops;
}

std::vector<RankTime> rank_times(int64_t seq_len, Layout layout,
                                 const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                 const Workload& workload) {
  std::vector<RankTime> times;
  for (const RankProfile& profile : profiles) {
    RankTime time;
    time.overhead_ms = profile.overhead_ms;
    time.max_tokens = profile.max_tokens.value_or(std::numeric_limits<int64_t>::max());
    const double attention =
        attention_flops(cost, workload) / (profile.attention_tflops * kFlopsPerMs);
    const double linear =
        (workload.training ? 3.0 : 1.0) * cost.linear_flops / (profile.linear_tflops * kFlopsPerMs);
    time.token_ms = linear;
    if (workload.mask.causal && layout == Layout::kContiguous) {
      time.pair_ms = attention;
    } else {
      const double keys = static_cast<double>(seq_len) / (workload.mask.causal ? 2 : 1);
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
    result[rank] = times[rank].time_ms(before, partition.length(rank));
    before += partition.length(rank);
  }
  return result;
}

double slowest(const std::vector<double>& ms) { return *std::max_element(ms.begin(), ms.end()); }

Ranks even_lengths(int64_t seq_len, int64_t world_size) {
  Ranks lengths(world_size, seq_len / world_size);
  for (int64_t rank = 0; rank < seq_len % world_size; ++rank) ++lengths[rank];
  return lengths;
}

bool are_equal(const std::vector<RankTime>& times) {
  return std::all_of(times.begin(), times.end(), [&](const RankTime& time) {
    return time.token_ms == times[0].token_ms && time.pair_ms == times[0].pair_ms;
  });
}

bool has_room(const std::vector<RankTime>& times, const Ranks& lengths) {
  for (size_t rank = 0; rank < times.size(); ++rank) {
    if (lengths[rank] > times[rank].max_tokens) return false;
  }
  return true;
}

int64_t coarsest_unit(int64_t seq_len, int64_t world_size) {
  for (const int64_t unit : kUnits) {
    if (unit * kUnitsPerRank * world_size <= seq_len) return unit;
  }
  return 1;
}

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

Ranks fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len) {
  Ranks order(times.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return times[a].time_ms(0, seq_len) < times[b].time_ms(0, seq_len);
  });
  return order;
}

Ranks best_lengths(const std::vector<RankTime>& times, const Ranks& order, int64_t seq_len,
                   int64_t unit) {
  const auto filled = [&](double limit) { return greedy_fill(times, order, seq_len, unit, limit); };
  return filled(smallest(enough_for_all(times, seq_len),
                         [&](double limit) { return total(filled(limit)) == seq_len; }));
}

namespace {

// Whether a rank's time depends on the tokens before its own.
bool depends_on_position(const std::vector<RankTime>& times) {
  return std::any_of(times.begin(), times.end(),
                     [](const RankTime& time) { return time.pair_ms > 0.0; });
}

// The best order of ranks whose time depends on the tokens before them: improves the best order
// known until none is better. Dynamic programming over sets of ranks: the tokens that a set can
// cover are the most that any of its ranks reaches after the others.
Ranks best_order(const std::vector<RankTime>& times, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(times.size());
  Ranks order = fast_to_slow(times, seq_len);
  if (world_size > kMaxOrderedRanks) return order;

  const uint32_t all = (1u << world_size) - 1;
  std::vector<int64_t> reach(all + 1), last(all + 1);
  const auto fits = [&](double limit) {
    for (uint32_t set = 1; set <= all; ++set) {
      reach[set] = -1;
      for (int64_t rank = world_size - 1; rank >= 0; --rank) {
        if (!(set >> rank & 1)) continue;
        const int64_t before = reach[set ^ (1u << rank)];
        const int64_t end =
            before + times[rank].max_tokens_within(before, seq_len - before, 1, limit);
        if (end > reach[set]) {
          reach[set] = end;
          last[set] = rank;
        }
      }
    }
    return reach[all] == seq_len;
  };
  const auto limit_of_order = [&] {
    const auto lengths = best_lengths(times, order, seq_len, 1);
    return slowest(rank_ms(Partition(Layout::kContiguous, lengths, order), times));
  };
  double limit = limit_of_order();
  while (limit > 0.0 && fits(limit * (1 - kOrderTolerance))) {
    uint32_t set = all;
    for (int64_t place = world_size - 1; place >= 0; --place) {
      order[place] = last[set];
      set ^= 1u << last[set];
    }
    limit = limit_of_order();
  }
  return order;
}

}  // namespace

Partition best_partition(const std::vector<RankTime>& times, Layout layout, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(times.size());
  const bool by_position = depends_on_position(times);
  const Ranks order = by_position ? best_order(times, seq_len) : fast_to_slow(times, seq_len);
  const auto with = [&](const Ranks& lengths) {
    return Partition(layout, lengths, by_position ? order : Ranks());
  };
  Partition best = with(best_lengths(times, order, seq_len, 1));
  const double limit = slowest(rank_ms(best, times)) * (1 + kUnitTolerance);
  for (const int64_t unit : kUnits) {
    if (unit > coarsest_unit(seq_len, world_size)) continue;
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

double ideal_ms(std::vector<RankTime> times, const Partition& partition) {
  const double seq_len = static_cast<double>(partition.seq_len());
  if (partition.seq_len() == 0) return 0.0;
  for (RankTime& time : times) {
    time.overhead_ms = 0.0;
    time.max_tokens = std::numeric_limits<int64_t>::max();
  }
  const auto in_order = [&](const Ranks& order) {
    return smallest(enough_for_all(times, partition.seq_len()), [&](double limit) {
      double before = 0.0;
      for (const int64_t rank : order) before += times[rank].tokens_within(before, limit);
      return before >= seq_len;
    });
  };
  // Without overheads and limits another order may be best.
  const double ms = in_order(partition.order());
  return depends_on_position(times) ? std::min(ms, in_order(best_order(times, partition.seq_len())))
                                    : ms;
}

}  // namespace ringattn
