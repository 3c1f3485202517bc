// SPDX-License-Identifier: Apache-2.0
#include "planner/water_filling.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace ringattn {
namespace {

constexpr int64_t kUnitsPerRank = 256;  // a unit is at most this fraction of the mean share

// Up to so many ranks, all orders of a contiguous partition are tried.
constexpr int64_t kMaxOrderedRanks = 8;
constexpr double kOrderTolerance = 1e-9;   // relative gain of an order
constexpr double kLimitTolerance = 1e-12;  // relative, of times

// Real numbers of tokens are counted in this unit; sums of them are exact.
constexpr double kRealUnit = 1.0 / (1 << 20);

// [W]: greedy, one rank after the other takes as many tokens as it can within `limit_ms`. The more
// tokens precede a rank, the further it ends, so no other lengths in this order cover more tokens.
std::vector<double> lengths_within(const std::vector<RankTime>& times, const RankOrder& order,
                                   double seq_len, double unit, double limit_ms) {
  std::vector<double> lengths(times.size());
  double before = 0.0;
  for (const int64_t rank : order) {
    lengths[rank] = times[rank].tokens_within(before, seq_len - before, unit, limit_ms);
    before += lengths[rank];
  }
  return lengths;
}

// The least limit within which ranks in this order take all tokens, by bisection.
double least_limit_ms(const std::vector<RankTime>& times, const RankOrder& order, double seq_len,
                      double unit) {
  double low = 0.0, high = 0.0;
  for (const RankTime& time : times) high = std::max(high, time.time_ms(0.0, seq_len));
  while (high - low > kLimitTolerance * high) {
    const double middle = low + (high - low) / 2;
    const auto lengths = lengths_within(times, order, seq_len, unit, middle);
    const bool all = std::accumulate(lengths.begin(), lengths.end(), 0.0) == seq_len;
    (all ? high : low) = middle;
  }
  return high;
}

// The best order; of ranks whose time depends on the tokens before them, improves the best order
// known until none is better. Dynamic programming over sets of ranks: the tokens that a set can
// cover are the most that any of its ranks reaches after the others.
RankOrder best_order(const std::vector<RankTime>& times, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(times.size());
  RankOrder order = fast_to_slow(times, seq_len);
  if (world_size > kMaxOrderedRanks || !times[0].by_position) return order;

  const double tokens = static_cast<double>(seq_len);
  const uint32_t all = (1u << world_size) - 1;
  std::vector<double> reach(all + 1);
  std::vector<int64_t> last(all + 1);
  const auto fits = [&](double limit) {
    for (uint32_t set = 1; set <= all; ++set) {
      reach[set] = -1.0;
      for (int64_t rank = world_size - 1; rank >= 0; --rank) {
        if (!(set >> rank & 1)) continue;
        const double before = reach[set ^ (1u << rank)];
        const double end = before + times[rank].tokens_within(before, tokens - before, 1.0, limit);
        if (end > reach[set]) {
          reach[set] = end;
          last[set] = rank;
        }
      }
    }
    return reach[all] == tokens;
  };
  while (true) {
    const double limit = least_limit_ms(times, order, tokens, 1.0);
    if (limit <= 0.0 || !fits(limit * (1 - kOrderTolerance))) return order;
    uint32_t set = all;
    for (int64_t place = world_size - 1; place >= 0; --place) {
      order[place] = last[set];
      set ^= 1u << last[set];
    }
  }
}

}  // namespace

Lengths even_lengths(int64_t seq_len, int64_t world_size) {
  Lengths lengths(world_size, seq_len / world_size);
  for (int64_t rank = 0; rank < seq_len % world_size; ++rank) ++lengths[rank];
  return lengths;
}

int64_t coarsest_unit(int64_t seq_len, int64_t world_size) {
  for (const int64_t unit : {256, 64, 16}) {
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
  const double tokens = static_cast<double>(seq_len), of = static_cast<double>(unit);
  const double limit = least_limit_ms(times, order, tokens, of);
  const std::vector<double> lengths = lengths_within(times, order, tokens, of, limit);
  return Lengths(lengths.begin(), lengths.end());
}

Partition fill_ranks_in(const TimeModel& model, const RankOrder& order) {
  const int64_t unit = coarsest_unit(model.seq_len(), model.world_size());
  return {model.layout(), best_lengths(model.ranks(), order, model.seq_len(), unit), order};
}

Partition fill_ranks(const TimeModel& model) {
  const Partition filled = fill_ranks_in(model, best_order(model.ranks(), model.seq_len()));
  return model.by_position() ? filled : Partition(model.layout(), filled.lengths());
}

double ideal_ms(const TimeModel& model) {
  std::vector<RankTime> times = model.ranks();
  for (RankTime& time : times) {
    time.overhead_ms = 0.0;
    time.max_tokens = std::numeric_limits<int64_t>::max();
  }
  return least_limit_ms(times, best_order(times, model.seq_len()),
                        static_cast<double>(model.seq_len()), kRealUnit);
}

}  // namespace ringattn
