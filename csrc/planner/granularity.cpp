// SPDX-License-Identifier: Apache-2.0
#include "planner/granularity.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "planner/water_filling.h"

namespace ringattn {
namespace {

constexpr int64_t kBudget = 3 << 13;      // evaluated blocks, W^2 for a partition, of all starts
constexpr double kMinGain = 1e-6;         // relative
constexpr double kMinGainOfOrder = 5e-3;  // less is within the model's error
constexpr int64_t kStep = 32;             // tokens that are moved at a time, in tiles
constexpr int64_t kStepsPerRank = 32;     // elsewhere so many are the mean share
constexpr int64_t kMaxSteps = 16;         // both segments' in tiles of 256 rows; then steps double

// The orders to try: that of `start`, its reverse, and each rank innermost. There the two segments
// of a rank are adjacent under zigzag, and one tile may hold an end of both.
std::vector<RankOrder> orders_of(const Partition& start) {
  const RankOrder& order = start.order();
  std::vector<RankOrder> orders = {order, RankOrder(order.rbegin(), order.rend())};
  for (const int64_t rank : order) {
    orders.push_back(order);
    std::stable_partition(orders.back().begin(), orders.back().end(),
                          [&](int64_t r) { return r != rank; });
  }
  return orders;
}

// The best partition found so far, and what may still be spent on better ones.
class Search {
 public:
  Search(const Partition& start, const TimeModel& model, int64_t depth, int64_t budget)
      : model_(model), depth_(depth), budget_(budget), best_(start) {
    best_ms_ = model.step_ms(start, depth);
    const int64_t mean = model.seq_len() / model.world_size();
    unit_ = coarsest_unit(model.seq_len(), model.world_size());
    step_ = model.has_tiles() ? kStep : std::max(unit_, mean / kStepsPerRank / unit_ * unit_);
  }

  const Partition& best() const { return best_; }

  // Lengths in whole tiles that end together as nearly as they can; without tiles, in `unit_`.
  void fill_units() {
    const Partition start = best_;
    const std::vector<RankTime>& times = model_.ranks();
    const int64_t seq_len = model_.seq_len();
    // Under zigzag each of a rank's two segments has tiles of its own.
    const bool in_halves = model_.mask().causal && model_.layout() == Layout::kZigzag;
    std::set<int64_t> units;
    for (const RankProfile& profile : model_.profiles()) {
      for (const AttentionTile& tile : profile.tiles) {
        units.insert(in_halves ? 2 * tile.rows : tile.rows);
      }
    }
    if (units.empty()) units.insert(unit_);
    const int64_t fastest = fast_to_slow(times, seq_len).front();
    left_ = budget_;
    for (const RankOrder& order : orders_of(start)) {
      if (left_ <= 0) return;
      take_if_better(start.lengths(), order);
      for (const int64_t unit : units) {
        const Lengths whole = best_lengths(times, order, seq_len - seq_len % unit, unit);
        for (const int64_t last : {order.back(), fastest}) {
          Lengths lengths = whole;
          lengths[last] += seq_len % unit;
          take_if_better(lengths, order);
        }
      }
    }
  }

  // Ranks give tokens to others, the slowest rank first: one may wait for another that owns too
  // many. Ranks that end first receive first.
  void move_tokens() {
    left_ = budget_;
    for (bool any = true; any && left_ > 0;) {
      RankOrder by_time(model_.world_size());
      std::iota(by_time.begin(), by_time.end(), 0);
      std::stable_sort(by_time.begin(), by_time.end(),
                       [&](int64_t a, int64_t b) { return best_ms_[a] < best_ms_[b]; });
      any = false;
      for (auto giver = by_time.rbegin(); giver != by_time.rend() && !any; ++giver) {
        any = give(*giver, by_time);
      }
    }
  }

 private:
  // Whether it is faster if `giver` gives tokens to one of the `receivers`.
  bool give(int64_t giver, const RankOrder& receivers) {
    const Partition from = best_;
    for (const int64_t receiver : receivers) {
      if (receiver == giver) continue;
      for (int64_t tokens = step_, given = 0; left_ > 0 && given < from.length(giver);) {
        given = std::min(tokens, from.length(giver));  // the last step takes all its tokens
        Lengths lengths = from.lengths();
        lengths[giver] -= given;
        lengths[receiver] += given;
        take_if_better(lengths, from.order());
        tokens += tokens < kMaxSteps * step_ ? step_ : tokens;
      }
    }
    return best_.lengths() != from.lengths();
  }

  void take_if_better(const Lengths& lengths, const RankOrder& order) {
    if (!has_room(model_.ranks(), lengths)) return;
    const Partition next(model_.layout(), lengths, order);
    left_ -= model_.world_size() * model_.world_size();
    const double min_gain = order == best_.order() ? kMinGain : kMinGainOfOrder;
    const double limit_ms = slowest(best_ms_) * (1 - min_gain);
    auto next_ms = model_.step_ms(next, depth_, limit_ms);
    if (slowest(next_ms) >= limit_ms) return;
    best_ = next;
    best_ms_ = std::move(next_ms);
  }

  const TimeModel& model_;
  const int64_t depth_, budget_;
  Partition best_;
  std::vector<double> best_ms_;
  int64_t unit_, step_;
  int64_t left_ = 0;  // of budget_
};

}  // namespace

std::vector<Partition> improve_lengths(const std::vector<Partition>& starts, const TimeModel& model,
                                       int64_t depth) {
  std::vector<Partition> improved;
  for (const Partition& start : starts) {
    Search search(start, model, depth, kBudget / static_cast<int64_t>(starts.size()));
    search.fill_units();
    search.move_tokens();
    improved.push_back(search.best());
  }
  return improved;
}

}  // namespace ringattn
