// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm90/scheduler/makespan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

namespace ringattn {
namespace {

constexpr int kMostExchanges = 1000;
constexpr int64_t kLeastGain = 200;    // one of so many
constexpr int64_t kEvenEnough = 1000;  // one of so many above the mean
constexpr int kMostTries = 3;

// Who is free when; the one that is free first, and of those the first, takes the next turn.
class Takers {
 public:
  explicit Takers(int64_t count) {
    for (int64_t i = 0; i < count; ++i) free_.emplace(0, i);
  }
  // Who, and when it will be free again.
  std::pair<int64_t, int64_t> take(const Turn& turn) {
    const auto [time, taker] = free_.top();
    free_.pop();
    const int64_t end = std::max<int64_t>(time + turn.length, turn.earliest_end);
    free_.emplace(end, taker);
    end_ = std::max(end_, end);
    return {taker, end};
  }
  int64_t end() const { return end_; }

 private:
  using Free = std::pair<int64_t, int64_t>;
  std::priority_queue<Free, std::vector<Free>, std::greater<>> free_;
  int64_t end_ = 0;
};

struct Share {
  int64_t before = 0;  // what it has done when the last turns begin
  int64_t load = 0;    // and what it will have done in the end
  std::vector<int> turns;
};

struct Exchange {
  int64_t load = 0;  // of the busier of the two afterwards
  size_t with = 0;
  size_t given = 0;
  size_t taken = 0;  // of `with`; past the end: nothing
};

// The best that the busiest can do with one other.
Exchange best_exchange(const std::vector<Share>& shares, size_t busiest,
                       const std::vector<Turn>& turns) {
  std::vector<size_t> by_load(shares.size());
  std::iota(by_load.begin(), by_load.end(), 0);
  std::sort(by_load.begin(), by_load.end(), [&](size_t a, size_t b) {
    return std::pair(shares[a].load, a) < std::pair(shares[b].load, b);
  });
  const Share& busy = shares[busiest];
  Exchange best{busy.load, busiest, 0, 0};
  for (const size_t with : by_load) {
    const Share& other = shares[with];
    // With nobody can it do better than to share evenly, and those that follow have more.
    if (busy.load + other.load >= 2 * best.load) break;
    const int64_t gap = busy.load - other.load;
    for (size_t given = 0; given < busy.turns.size(); ++given) {
      for (size_t taken = 0; taken <= other.turns.size(); ++taken) {
        const int64_t back = taken < other.turns.size() ? turns[other.turns[taken]].length : 0;
        const int64_t moved = turns[busy.turns[given]].length - back;
        if (moved <= 0 || moved >= gap) continue;
        const int64_t load = std::max(busy.load - moved, other.load + moved);
        if (load < best.load) best = {load, with, given, taken};
      }
    }
  }
  return best;
}

void even_out(std::vector<Share>& shares, const std::vector<Turn>& turns) {
  const auto lighter = [](const Share& a, const Share& b) { return a.load < b.load; };
  int64_t sum = 0;
  for (const Share& share : shares) sum += share.load;
  const int64_t even = sum / static_cast<int64_t>(shares.size());
  for (int i = 0; i < kMostExchanges; ++i) {
    const size_t busiest = std::max_element(shares.begin(), shares.end(), lighter) - shares.begin();
    if (shares[busiest].load <= even + even / kEvenEnough) return;
    const Exchange best = best_exchange(shares, busiest, turns);
    if (best.with == busiest) return;
    Share &busy = shares[busiest], &other = shares[best.with];
    const int given = busy.turns[best.given];
    int64_t moved = turns[given].length;
    busy.turns.erase(busy.turns.begin() + best.given);
    if (best.taken < other.turns.size()) {
      const int taken = other.turns[best.taken];
      moved -= turns[taken].length;
      other.turns.erase(other.turns.begin() + best.taken);
      busy.turns.push_back(taken);
    }
    other.turns.push_back(given);
    busy.load -= moved;
    other.load += moved;
  }
}

// With turns before `first` where they are. How long that takes: `end`.
std::vector<uint16_t> evened_out(const std::vector<Turn>& turns, int64_t num_takers, int64_t first,
                                 int64_t& end) {
  const int64_t count = turns.size();
  std::vector<Share> shares(num_takers);
  Takers takers(num_takers);
  for (int64_t turn = 0; turn < count; ++turn) {
    const auto [taker, taken_until] = takers.take(turns[turn]);
    Share& share = shares[taker];
    if (turn < first) {
      share.before = share.load = taken_until;
    } else {
      share.load += turns[turn].length;
      share.turns.push_back(static_cast<int>(turn));
    }
  }
  even_out(shares, turns);

  // Handed out in the order in which they begin, turns go to whom they were given.
  std::vector<std::pair<int64_t, int>> begins;
  for (Share& share : shares) {
    std::sort(share.turns.begin(), share.turns.end());
    int64_t begin = share.before;
    for (const int turn : share.turns) {
      begins.emplace_back(begin, turn);
      begin += turns[turn].length;
    }
  }
  std::sort(begins.begin(), begins.end());
  // Of equal turns, the first comes first: what it needs has been there for longest.
  std::map<int, std::vector<int64_t>> equal;
  for (int64_t turn = count - 1; turn >= first; --turn) equal[turns[turn].length].push_back(turn);
  std::vector<uint16_t> order;
  std::vector<Turn> reordered(turns.begin(), turns.begin() + first);
  for (const auto& [begin, turn] : begins) {
    std::vector<int64_t>& left = equal[turns[turn].length];
    order.push_back(static_cast<uint16_t>(left.back() - first));
    reordered.push_back(turns[left.back()]);
    left.pop_back();
  }
  end = time_of_turns(reordered, num_takers);
  return order;
}

}  // namespace

int64_t time_of_turns(const std::vector<Turn>& turns, int64_t num_takers) {
  Takers takers(num_takers);
  for (const Turn& turn : turns) takers.take(turn);
  return takers.end();
}

std::vector<uint16_t> order_of_last_turns(const std::vector<Turn>& turns, int64_t num_takers,
                                          int64_t most) {
  const int64_t count = turns.size();
  int64_t first = std::max<int64_t>(0, count - std::min<int64_t>(most, UINT16_MAX));
  std::vector<uint16_t> best;
  int64_t best_end = time_of_turns(turns, num_takers);
  const auto gains = [&](int64_t end) { return (best_end - end) * kLeastGain > best_end; };
  int64_t sum = 0;
  for (const Turn& turn : turns) sum += turn.length;
  const int64_t even = sum / num_takers;  // no order ends sooner
  // The more may be moved, the more evenly they end, but what a turn needs may not be there yet.
  for (int i = 0; i < kMostTries && first < count && gains(even); ++i, first += num_takers) {
    int64_t end = 0;
    std::vector<uint16_t> order = evened_out(turns, num_takers, first, end);
    if (!gains(end)) continue;
    best = std::move(order);
    best_end = end;
  }
  return best;
}

std::vector<Turn> with_last_in_order(const std::vector<Turn>& turns,
                                     const std::vector<uint16_t>& order) {
  std::vector<Turn> result(turns.begin(), turns.end() - order.size());
  const size_t first = result.size();
  for (const uint16_t i : order) result.push_back(turns[first + i]);
  return result;
}

}  // namespace ringattn
