// SPDX-License-Identifier: Apache-2.0
#include "attention/turn_order.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

namespace ringattn {
namespace {

constexpr int kMostExchanges = 400;
constexpr int kPartners = 8;         // those done first, whom the one done last exchanges with
constexpr int64_t kLeastGain = 200;  // one of so many

// Who is free when; the one that is free first, and of those the first, takes the next turn.
class Takers {
 public:
  explicit Takers(int64_t count) {
    for (int64_t i = 0; i < count; ++i) free_.emplace(0, i);
  }
  int64_t take(int length) {
    auto [time, taker] = free_.top();
    free_.pop();
    free_.emplace(time + length, taker);
    end_ = std::max(end_, time + length);
    return taker;
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

// The best that the busiest can do with one of those that are done first.
Exchange best_exchange(const std::vector<Share>& shares, size_t busiest,
                       const std::vector<int>& lengths) {
  std::vector<size_t> by_load(shares.size());
  std::iota(by_load.begin(), by_load.end(), 0);
  const size_t partners = std::min<size_t>(kPartners, by_load.size());
  std::partial_sort(by_load.begin(), by_load.begin() + partners, by_load.end(),
                    [&](size_t a, size_t b) {
                      return std::pair(shares[a].load, a) < std::pair(shares[b].load, b);
                    });
  const Share& busy = shares[busiest];
  Exchange best{busy.load, busiest, 0, 0};
  for (size_t i = 0; i < partners; ++i) {
    const Share& other = shares[by_load[i]];
    const int64_t gap = busy.load - other.load;
    for (size_t given = 0; given < busy.turns.size(); ++given) {
      for (size_t taken = 0; taken <= other.turns.size(); ++taken) {
        const int64_t back = taken < other.turns.size() ? lengths[other.turns[taken]] : 0;
        const int64_t moved = lengths[busy.turns[given]] - back;
        if (moved <= 0 || moved >= gap) continue;
        const int64_t load = std::max(busy.load - moved, other.load + moved);
        if (load < best.load) best = {load, by_load[i], given, taken};
      }
    }
  }
  return best;
}

void even_out(std::vector<Share>& shares, const std::vector<int>& lengths) {
  const auto lighter = [](const Share& a, const Share& b) { return a.load < b.load; };
  for (int i = 0; i < kMostExchanges; ++i) {
    const size_t busiest = std::max_element(shares.begin(), shares.end(), lighter) - shares.begin();
    const Exchange best = best_exchange(shares, busiest, lengths);
    if (best.with == busiest) return;
    Share &busy = shares[busiest], &other = shares[best.with];
    const int given = busy.turns[best.given];
    int64_t moved = lengths[given];
    busy.turns.erase(busy.turns.begin() + best.given);
    if (best.taken < other.turns.size()) {
      const int taken = other.turns[best.taken];
      moved -= lengths[taken];
      other.turns.erase(other.turns.begin() + best.taken);
      busy.turns.push_back(taken);
    }
    other.turns.push_back(given);
    busy.load -= moved;
    other.load += moved;
  }
}

}  // namespace

int64_t time_of_turns(const std::vector<int>& lengths, int64_t num_takers) {
  Takers takers(num_takers);
  for (const int length : lengths) takers.take(length);
  return takers.end();
}

std::vector<uint16_t> order_of_last_turns(const std::vector<int>& lengths, int64_t num_takers,
                                          int64_t most) {
  const int64_t count = lengths.size();
  const int64_t first = std::max<int64_t>(0, count - std::min<int64_t>(most, UINT16_MAX));
  std::vector<Share> shares(num_takers);
  Takers takers(num_takers);
  for (int64_t turn = 0; turn < count; ++turn) {
    Share& share = shares[takers.take(lengths[turn])];
    share.load += lengths[turn];
    if (turn < first) {
      share.before = share.load;
    } else {
      share.turns.push_back(static_cast<int>(turn));
    }
  }
  even_out(shares, lengths);

  // Handed out in the order in which they begin, turns go to whom they were given.
  std::vector<std::pair<int64_t, int>> begins;
  for (Share& share : shares) {
    std::sort(share.turns.begin(), share.turns.end());
    int64_t begin = share.before;
    for (const int turn : share.turns) {
      begins.emplace_back(begin, turn);
      begin += lengths[turn];
    }
  }
  std::sort(begins.begin(), begins.end());
  // Of equal turns, the first comes first: what it needs has been there for longest.
  std::map<int, std::vector<int64_t>> equal;
  for (int64_t turn = count - 1; turn >= first; --turn) equal[lengths[turn]].push_back(turn);
  std::vector<uint16_t> order;
  std::vector<int> reordered(lengths.begin(), lengths.begin() + first);
  for (const auto& [begin, turn] : begins) {
    std::vector<int64_t>& left = equal[lengths[turn]];
    order.push_back(static_cast<uint16_t>(left.back() - first));
    left.pop_back();
    reordered.push_back(lengths[turn]);
  }
  const int64_t end = takers.end(), new_end = time_of_turns(reordered, num_takers);
  return (end - new_end) * kLeastGain < end ? std::vector<uint16_t>{} : order;
}

}  // namespace ringattn
