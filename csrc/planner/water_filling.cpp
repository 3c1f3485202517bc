// SPDX-License-Identifier: Apache-2.0
#include "planner/water_filling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ringattn {
namespace {

constexpr int64_t kUnits[] = {256, 64, 16};
constexpr int64_t kUnitsPerRank = 256;  // a unit is at most this fraction of the mean share

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
Lengths lengths_within(const std::vector<RankTime>& times, const RankOrder& order, int64_t seq_len,
                       int64_t unit, double limit_ms) {
  Lengths lengths(times.size());
  int64_t before = 0;
  for (const int64_t rank : order) {
    lengths[rank] = times[rank].max_tokens_within(before, seq_len - before, unit, limit_ms);
    before += lengths[rank];
  }
  return lengths;
}

int64_t total(const Lengths& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

// An upper bound of the time of any rank for any number of tokens.
double enough_for_all(const std::vector<RankTime>& times, int64_t seq_len) {
  double limit = 0.0;
  for (const RankTime& time : times) limit = std::max(limit, time.time_ms(0, seq_len));
  return limit;
}

}  // namespace

Lengths even_lengths(int64_t seq_len, int64_t world_size) {
  Lengths lengths(world_size, seq_len / world_size);
  for (int64_t rank = 0; rank < seq_len % world_size; ++rank) ++lengths[rank];
  return lengths;
}

int64_t coarsest_unit(int64_t seq_len, int64_t world_size) {
  for (const int64_t unit : kUnits) {
    if (unit * kUnitsPerRank * world_size <= seq_len) return unit;
  }
  return 1;
}

RankOrder alternating(const Lengths& lengths) {
  RankOrder sorted(lengths.size()), order;
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  for (size_t first = 0, last = sorted.size(); first < last;) {
    order.push_back(sorted[first++]);
    if (first < last) order.push_back(sorted[--last]);
  }
  return order;
}

RankOrder fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len) {
  RankOrder order(times.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return times[a].time_ms(0, seq_len) < times[b].time_ms(0, seq_len);
  });
  return order;
}

Lengths best_lengths(const std::vector<RankTime>& times, const RankOrder& order, int64_t seq_len,
                     int64_t unit) {
  const auto filled = [&](double limit) {
    return lengths_within(times, order, seq_len, unit, limit);
  };
  return filled(smallest(enough_for_all(times, seq_len),
                         [&](double limit) { return total(filled(limit)) == seq_len; }));
}

namespace {

// The best order of ranks whose time depends on the tokens before them: improves the best order
// known until none is better. Dynamic programming over sets of ranks: the tokens that a set can
// cover are the most that any of its ranks reaches after the others.
RankOrder best_order(const std::vector<RankTime>& times, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(times.size());
  RankOrder order = fast_to_slow(times, seq_len);
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
    return slowest(smooth_ms(Partition(Layout::kContiguous, lengths, order), times));
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

Partition fill_ranks_in(const TimeModel& model, const RankOrder& order) {
  const int64_t unit = coarsest_unit(model.seq_len(), model.world_size());
  return {model.layout(), best_lengths(model.ranks(), order, model.seq_len(), unit), order};
}

Partition fill_ranks(const TimeModel& model) {
  const std::vector<RankTime>& times = model.ranks();
  if (model.by_position()) return fill_ranks_in(model, best_order(times, model.seq_len()));
  const Partition filled = fill_ranks_in(model, fast_to_slow(times, model.seq_len()));
  return {model.layout(), filled.lengths()};
}

double ideal_ms(const TimeModel& model, const Partition& partition) {
  const int64_t seq_len = model.seq_len();
  if (seq_len == 0) return 0.0;
  std::vector<RankTime> times = model.ranks();
  for (RankTime& time : times) {
    time.overhead_ms = 0.0;
    time.max_tokens = std::numeric_limits<int64_t>::max();
  }
  const auto in_order = [&](const RankOrder& order) {
    return smallest(enough_for_all(times, seq_len), [&](double limit) {
      double before = 0.0;
      for (const int64_t rank : order) before += times[rank].tokens_within(before, limit);
      return before >= static_cast<double>(seq_len);
    });
  };
  // Without overheads and limits another order may be best.
  const double ms = in_order(partition.order());
  return model.by_position() ? std::min(ms, in_order(best_order(times, seq_len))) : ms;
}

}  // namespace ringattn
