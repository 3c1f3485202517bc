// SPDX-License-Identifier: Apache-2.0
#include "planner/link_search.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/ring_simulation.h"
#include "planner/tiles.h"

namespace ringattn {
namespace {

// Up to so many ranks every set is tried and the best few are improved; above, only one.
constexpr int64_t kMaxSubsetRanks = 4;
constexpr size_t kClimbs = 4;
constexpr int64_t kMaxOrderedRanks = 3;  // up to so many, every order
constexpr int64_t kBudget = 1 << 16;     // simulated blocks, W^2 for a partition
constexpr double kMinGain = 1e-6;        // of a step, relative

struct Candidate {
  Partition partition;
  std::vector<double> rank_ms;
  double ms;
  size_t set = 0;  // the set of ranks that it started from
};

class Search {
 public:
  explicit Search(const RingProblem& problem)
      : problem_(problem), cost_of_one_(in_tiles(problem.profiles) ? 2 : 1) {}

  Candidate weigh(const Partition& partition) {
    spent_ += cost_of_one_ * partition.world_size() * partition.world_size();
    auto rank_ms = problem_.rank_ms(partition);
    const double ms = slowest(rank_ms);
    return {partition, std::move(rank_ms), ms};
  }

  // Lengths that end together without waits, for each set of ranks in this order; the fastest
  // first.
  std::vector<Candidate> starts(Layout layout, const std::vector<Ranks>& sets, const Ranks& order,
                                int64_t seq_len) {
    std::vector<Candidate> starts;
    for (size_t i = 0; i < sets.size(); ++i) {
      const Ranks& set = sets[i];
      int64_t room = 0;
      for (const int64_t rank : set) room += std::min(problem_.times[rank].max_tokens, seq_len);
      if (room < seq_len) continue;
      Ranks active(order.size());
      for (const int64_t rank : set) active[rank] = 1;
      const auto lengths = balanced(active, order, seq_len);
      starts.push_back(weigh(Partition(layout, lengths, order)));
      starts.back().set = i;
      // With few ranks, all orders are tried anyway.
      const bool has_orders_left = static_cast<int64_t>(order.size()) > kMaxOrderedRanks;
      if (layout == Layout::kZigzag && has_orders_left) {
        starts.push_back(weigh(Partition(layout, lengths, alternating(lengths))));
        starts.back().set = i;
      }
    }
    std::stable_sort(starts.begin(), starts.end(),
                     [](const Candidate& a, const Candidate& b) { return a.ms < b.ms; });
    return starts;
  }

  // Moves tokens between ranks, in smaller and smaller steps, and exchanges ranks while that helps.
  Candidate climb(Candidate best, int64_t budget) {
    const int64_t limit = spent_ + budget;
    const int64_t seq_len = best.partition.seq_len();
    const int64_t unit = coarsest_unit(seq_len, best.partition.world_size());
    int64_t step = unit;
    while (4 * step <= seq_len) step *= 2;
    for (; step >= unit && spent_ < limit; step /= 2) {
      while (move(best, step, limit)) {
      }
      if (step == unit && exchange(best, limit)) step *= 4;
    }
    return best;
  }

 private:
  // Lengths that end together, for the ranks with tokens.
  Ranks balanced(const Ranks& lengths, const Ranks& order, int64_t seq_len) const {
    auto times = problem_.times;
    int64_t active = 0;
    for (size_t rank = 0; rank < times.size(); ++rank) {
      if (lengths[rank] == 0) times[rank].max_tokens = 0;
      active += lengths[rank] > 0;
    }
    return best_lengths(times, order, seq_len, coarsest_unit(seq_len, active));
  }

  bool better(Candidate& best, const Partition& partition) {
    Candidate next = weigh(partition);
    if (!(next.ms < best.ms * (1 - kMinGain))) return false;
    best = std::move(next);
    return true;
  }

  // Whether some move of `step` tokens helped.
  bool move(Candidate& best, int64_t step, int64_t limit) {
    bool any = false;
    const int64_t world_size = best.partition.world_size();
    for (int64_t from = 0; from < world_size; ++from) {
      for (int64_t to = 0; to < world_size; ++to) {
        const Partition& partition = best.partition;
        const int64_t room = problem_.times[to].max_tokens - partition.length(to);
        const int64_t tokens = std::min({step, partition.length(from), room});
        if (from == to || tokens == 0) continue;
        if (spent_ >= limit) return false;
        Ranks lengths = partition.lengths();
        lengths[from] -= tokens;
        lengths[to] += tokens;
        any |= better(best, Partition(partition.layout(), lengths, partition.order()));
      }
    }
    return any;
  }

  bool exchange(Candidate& best, int64_t limit) {
    bool any = false;
    const int64_t world_size = best.partition.world_size();
    for (int64_t first = 0; first < world_size; ++first) {
      for (int64_t second = first + 1; second < world_size; ++second) {
        if (spent_ >= limit) return false;
        const Layout layout = best.partition.layout();
        const Ranks lengths = best.partition.lengths();
        Ranks order = best.partition.order();
        std::swap(order[first], order[second]);
        any |= better(best, Partition(layout, lengths, order));
        any |= better(best,
                      Partition(layout, balanced(lengths, order, best.partition.seq_len()), order));
      }
    }
    return any;
  }

  const RingProblem& problem_;
  const int64_t cost_of_one_;  // with tiles, padding is computed too
  int64_t spent_ = 0;
};

// Ranks by the time of a block of mean length over their links, the slowest first; equal ones by
// speed.
Ranks by_links(const RingProblem& problem, int64_t seq_len) {
  const double bytes = static_cast<double>(problem.cost.kv_bytes) * static_cast<double>(seq_len) /
                       static_cast<double>(problem.profiles.size());
  const auto ms = [&](int64_t rank) {
    const RankProfile& profile = problem.profiles[rank];
    return profile.link_latency_us.value_or(0.0) / 1e3 +
           (profile.link_gbps ? bytes / (*profile.link_gbps * 1e6) : 0.0);
  };
  Ranks ranks = fast_to_slow(problem.times, seq_len);
  std::reverse(ranks.begin(), ranks.end());
  std::stable_sort(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) { return ms(a) > ms(b); });
  return ranks;
}

// Every set of ranks; with many ranks, all but the k with the slowest links, and each rank alone.
std::vector<Ranks> rank_sets(const RingProblem& problem, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(problem.profiles.size());
  std::vector<Ranks> sets;
  if (world_size > kMaxSubsetRanks) {
    const Ranks worst_first = by_links(problem, seq_len);
    for (int64_t rank = 0; rank < world_size; ++rank) {
      sets.push_back({rank});
      sets.emplace_back(worst_first.begin() + rank, worst_first.end());
    }
    return sets;
  }
  for (uint32_t set = 1; set < 1u << world_size; ++set) {
    sets.emplace_back();
    for (int64_t rank = 0; rank < world_size; ++rank) {
      if (set >> rank & 1) sets.back().push_back(rank);
    }
  }
  return sets;
}

// With many ranks, all but the k slowest.
std::vector<Ranks> fast_rank_sets(const RingProblem& problem, int64_t seq_len) {
  const int64_t world_size = static_cast<int64_t>(problem.profiles.size());
  std::vector<Ranks> sets;
  if (world_size <= kMaxSubsetRanks) return sets;
  const Ranks ranks = fast_to_slow(problem.times, seq_len);
  for (int64_t count = 2; count < world_size; ++count) {
    sets.emplace_back(ranks.begin(), ranks.begin() + count);
  }
  return sets;
}

// This order and its reverse; with few ranks, every order.
std::vector<Ranks> rank_orders(const Ranks& order) {
  std::vector<Ranks> orders = {order, {order.rbegin(), order.rend()}};
  if (static_cast<int64_t>(order.size()) > kMaxOrderedRanks) return orders;
  orders.clear();
  Ranks next = order;
  std::sort(next.begin(), next.end());
  do {
    orders.push_back(next);
  } while (std::next_permutation(next.begin(), next.end()));
  return orders;
}

}  // namespace

std::vector<double> RingProblem::busy_ms(const Partition& partition) const {
  const auto visits_of = schedules(partition, workload.mask);
  return ringattn::busy_ms(partition, visits_of, times, profiles, cost, workload);
}

std::vector<double> RingProblem::rank_ms(const Partition& partition) const {
  const auto visits_of = schedules(partition, workload.mask);
  auto ms = ringattn::busy_ms(partition, visits_of, times, profiles, cost, workload);
  const auto waits = simulate_waits(visits_of, profiles, cost, depth);
  for (size_t rank = 0; rank < ms.size(); ++rank) ms[rank] += waits[rank];
  return ms;
}

Partition search_with_links(const Partition& start, const RingProblem& problem) {
  Search search(problem);
  Candidate best = search.weigh(start);
  const Partition even(start.layout(), even_lengths(start.seq_len(), start.world_size()));
  if (has_room(problem.times, even.lengths())) {
    Candidate even_candidate = search.weigh(even);
    if (even_candidate.ms <= best.ms) best = std::move(even_candidate);
  }
  const auto sets = rank_sets(problem, start.seq_len());
  const auto fast_sets = fast_rank_sets(problem, start.seq_len());
  const auto orders = rank_orders(start.order());
  const size_t climbs = start.world_size() <= kMaxSubsetRanks ? kClimbs : 1;
  const int64_t budget = kBudget / static_cast<int64_t>(climbs * orders.size());
  for (const Ranks& order : orders) {
    std::vector<size_t> climbed;  // sets of ranks
    for (const Candidate& first : search.starts(start.layout(), sets, order, start.seq_len())) {
      if (climbed.size() == climbs) break;
      if (std::find(climbed.begin(), climbed.end(), first.set) != climbed.end()) continue;
      climbed.push_back(first.set);
      Candidate top = search.climb(first, budget);
      if (top.ms < best.ms * (1 - kMinGain)) best = std::move(top);
    }
    // Slow ranks in good places can gain more than they cost, so the fast ones alone are improved
    // only where they are faster from the start.
    const auto fast = search.starts(start.layout(), fast_sets, order, start.seq_len());
    if (!fast.empty() && fast.front().ms < best.ms) {
      Candidate top = search.climb(fast.front(), budget);
      if (top.ms < best.ms * (1 - kMinGain)) best = std::move(top);
    }
  }
  // The same ranks in finer units, where coarse ones cost too much.
  auto times = problem.times;
  for (size_t rank = 0; rank < times.size(); ++rank) {
    if (best.partition.length(static_cast<int64_t>(rank)) == 0) times[rank].max_tokens = 0;
  }
  const Partition fine = best_partition(times, start.layout(), start.seq_len());
  for (const Ranks& order : {best.partition.order(), fine.order()}) {
    Candidate fine_candidate = search.weigh(Partition(start.layout(), fine.lengths(), order));
    if (fine_candidate.ms < best.ms * (1 - kUnitTolerance)) best = std::move(fine_candidate);
  }
  return best.partition;
}

}  // namespace ringattn
