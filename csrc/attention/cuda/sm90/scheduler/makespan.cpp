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

constexpr int kMaxExchanges = 1000;
constexpr int64_t kMinGain = 200;      // 1 / 200 of the makespan
constexpr int64_t kEvenEnough = 1000;  // at most 1 / 1000 above the mean
constexpr int kMaxTries = 3;

// When each worker is free. The worker that is free first, the first of several, takes the next
// tile.
class Workers {
 public:
  explicit Workers(int64_t count) {
    for (int64_t i = 0; i < count; ++i) free_.emplace(0, i);
  }
  // Returns the worker, and when it will be free again.
  std::pair<int64_t, int64_t> assign(const WorkTile& tile) {
    const auto [time, worker] = free_.top();
    free_.pop();
    const int64_t end = std::max<int64_t>(time + tile.duration, tile.earliest_end);
    free_.emplace(end, worker);
    end_ = std::max(end_, end);
    return {worker, end};
  }
  int64_t end() const { return end_; }

 private:
  using Free = std::pair<int64_t, int64_t>;
  std::priority_queue<Free, std::vector<Free>, std::greater<>> free_;
  int64_t end_ = 0;
};

struct Share {
  int64_t before = 0;  // time at which the worker starts its tail
  int64_t load = 0;    // time at which it ends it
  std::vector<int> tiles;
};

struct Exchange {
  int64_t load = 0;  // of the busier of the two workers afterwards
  size_t with = 0;
  size_t given = 0;
  size_t taken = 0;  // of `with`; past the end: nothing
};

// The best exchange of the busiest worker with one other.
Exchange best_exchange(const std::vector<Share>& shares, size_t busiest,
                       const std::vector<WorkTile>& tiles) {
  std::vector<size_t> by_load(shares.size());
  std::iota(by_load.begin(), by_load.end(), 0);
  std::sort(by_load.begin(), by_load.end(), [&](size_t a, size_t b) {
    return std::pair(shares[a].load, a) < std::pair(shares[b].load, b);
  });
  const Share& busy = shares[busiest];
  Exchange best{busy.load, busiest, 0, 0};
  for (const size_t with : by_load) {
    const Share& other = shares[with];
    // An exchange can at best share evenly, and the workers that follow have more load.
    if (busy.load + other.load >= 2 * best.load) break;
    const int64_t gap = busy.load - other.load;
    for (size_t given = 0; given < busy.tiles.size(); ++given) {
      for (size_t taken = 0; taken <= other.tiles.size(); ++taken) {
        const int64_t back = taken < other.tiles.size() ? tiles[other.tiles[taken]].duration : 0;
        const int64_t moved = tiles[busy.tiles[given]].duration - back;
        if (moved <= 0 || moved >= gap) continue;
        const int64_t load = std::max(busy.load - moved, other.load + moved);
        if (load < best.load) best = {load, with, given, taken};
      }
    }
  }
  return best;
}

// Local search: the busiest worker exchanges one tile for none or a shorter one, until no exchange
// helps.
void exchange_tiles(std::vector<Share>& shares, const std::vector<WorkTile>& tiles) {
  const auto lighter = [](const Share& a, const Share& b) { return a.load < b.load; };
  int64_t sum = 0;
  for (const Share& share : shares) sum += share.load;
  const int64_t even = sum / static_cast<int64_t>(shares.size());
  for (int i = 0; i < kMaxExchanges; ++i) {
    const size_t busiest = std::max_element(shares.begin(), shares.end(), lighter) - shares.begin();
    if (shares[busiest].load <= even + even / kEvenEnough) return;
    const Exchange best = best_exchange(shares, busiest, tiles);
    if (best.with == busiest) return;
    Share &busy = shares[busiest], &other = shares[best.with];
    const int given = busy.tiles[best.given];
    int64_t moved = tiles[given].duration;
    busy.tiles.erase(busy.tiles.begin() + best.given);
    if (best.taken < other.tiles.size()) {
      const int taken = other.tiles[best.taken];
      moved -= tiles[taken].duration;
      other.tiles.erase(other.tiles.begin() + best.taken);
      busy.tiles.push_back(taken);
    }
    other.tiles.push_back(given);
    busy.load -= moved;
    other.load += moved;
  }
}

// An order of the tiles from `first` on; `end`: its makespan.
std::vector<uint16_t> rebalanced(const std::vector<WorkTile>& tiles, int64_t num_workers,
                                 int64_t first, int64_t& end) {
  const int64_t count = tiles.size();
  std::vector<Share> shares(num_workers);
  Workers workers(num_workers);
  for (int64_t tile = 0; tile < count; ++tile) {
    const auto [worker, busy_until] = workers.assign(tiles[tile]);
    Share& share = shares[worker];
    if (tile < first) {
      share.before = share.load = busy_until;
    } else {
      share.load += tiles[tile].duration;
      share.tiles.push_back(static_cast<int>(tile));
    }
  }
  exchange_tiles(shares, tiles);

  // Taken in the order in which they start, tiles go to the workers that the search gave them to.
  std::vector<std::pair<int64_t, int>> begins;
  for (Share& share : shares) {
    std::sort(share.tiles.begin(), share.tiles.end());
    int64_t begin = share.before;
    for (const int tile : share.tiles) {
      begins.emplace_back(begin, tile);
      begin += tiles[tile].duration;
    }
  }
  std::sort(begins.begin(), begins.end());
  // Of equal tiles the first comes first: its keys arrive first.
  std::map<int, std::vector<int64_t>> equal;
  for (int64_t tile = count - 1; tile >= first; --tile) equal[tiles[tile].duration].push_back(tile);
  std::vector<uint16_t> order;
  std::vector<WorkTile> reordered(tiles.begin(), tiles.begin() + first);
  for (const auto& [begin, tile] : begins) {
    std::vector<int64_t>& left = equal[tiles[tile].duration];
    order.push_back(static_cast<uint16_t>(left.back() - first));
    reordered.push_back(tiles[left.back()]);
    left.pop_back();
  }
  end = makespan(reordered, num_workers);
  return order;
}

/// The tile with which the tail begins.
int64_t first_of_tail(int64_t count, int64_t max_tail) {
  return std::max<int64_t>(0, count - std::min<int64_t>(max_tail, UINT16_MAX));
}

}  // namespace

int64_t makespan(const std::vector<WorkTile>& tiles, int64_t num_workers) {
  Workers workers(num_workers);
  for (const WorkTile& tile : tiles) workers.assign(tile);
  return workers.end();
}

std::vector<uint16_t> rebalance_tail(const std::vector<WorkTile>& tiles, int64_t num_workers,
                                     int64_t max_tail) {
  const int64_t count = tiles.size();
  int64_t first = first_of_tail(count, max_tail);
  std::vector<uint16_t> best;
  int64_t best_end = makespan(tiles, num_workers);
  const auto gains = [&](int64_t end) { return (best_end - end) * kMinGain > best_end; };
  int64_t sum = 0;
  for (const WorkTile& tile : tiles) sum += tile.duration;
  const int64_t even = sum / num_workers;  // no order has a smaller makespan
  // With more tiles to exchange workers end more evenly, but keys of a tile may not have arrived.
  for (int i = 0; i < kMaxTries && first < count && gains(even); ++i, first += num_workers) {
    int64_t end = 0;
    std::vector<uint16_t> order = rebalanced(tiles, num_workers, first, end);
    if (!gains(end)) continue;
    best = std::move(order);
    best_end = end;
  }
  return best;
}

std::vector<uint16_t> longest_first_tail(const std::vector<WorkTile>& tiles, int64_t num_workers,
                                         int64_t max_tail) {
  const int64_t count = tiles.size();
  const int64_t first = first_of_tail(count, max_tail);
  std::vector<uint16_t> order(count - first);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint16_t a, uint16_t b) {
    return tiles[first + a].duration > tiles[first + b].duration;
  });
  const bool is_later =
      makespan(with_tail_order(tiles, order), num_workers) > makespan(tiles, num_workers);
  return is_later ? std::vector<uint16_t>{} : order;
}

std::vector<WorkTile> with_tail_order(const std::vector<WorkTile>& tiles,
                                      const std::vector<uint16_t>& order) {
  std::vector<WorkTile> result(tiles.begin(), tiles.end() - order.size());
  const size_t first = result.size();
  for (const uint16_t i : order) result.push_back(tiles[first + i]);
  return result;
}

}  // namespace ringattn
