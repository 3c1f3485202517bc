// SPDX-License-Identifier: Apache-2.0
#include "planner/tiles.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "core/ceil_div.h"

namespace ringattn {
namespace {

constexpr int64_t kBudget = 1 << 14;      // evaluated blocks, W^2 for a partition
constexpr int64_t kMaxOrderedRanks = 3;   // up to so many, every order
constexpr double kMinGain = 1e-6;         // relative
constexpr double kMinGainOfOrder = 5e-3;  // less is within the model's error
constexpr int64_t kStep = 32;             // tokens that are moved at a time
constexpr int64_t kMaxSteps = 16;         // as many as both segments have in a tile of 256 rows

// The sum of (first + i * step) / divisor, rounded down, over `count` numbers i from 0 on.
int64_t sum_of_quotients(int64_t count, int64_t first, int64_t step, int64_t divisor) {
  if (count == 0) return 0;
  int64_t sum = count * (count - 1) / 2 * (step / divisor) + count * (first / divisor);
  step %= divisor;
  first %= divisor;
  const int64_t end = first + count * step;
  // By the inverse: for each quotient, the number of arguments that reach it.
  if (end >= divisor) sum += sum_of_quotients(end / divisor, end % divisor, divisor, step);
  return sum;
}

// Also where a triangle is too small to hide a pair: the model masks keys in each of its tiles.
bool is_triangle(const Band& band) { return band.upper < Band::kUnlimited; }

// The number of tiles of `visits`, weighted by their time. All visits are one launch, whose query
// tiles do not cross the row from which on later owners' blocks are visible.
double tiles_of(const std::vector<Visit>& visits, int64_t num_rows, const AttentionTile& tile) {
  int64_t split = 0;
  for (const Visit& visit : visits) {
    for (const Band& band : visit.bands) split = std::max(split, band.query_begin);
  }
  double count = 0.0;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, split}, std::pair{split, num_rows}}) {
    if (begin == end) continue;
    const int64_t others = ceil_div(end - begin, tile.rows) - 1;  // than the last tile of rows
    int64_t of_others = 0, of_last = 0;                           // tiles of keys
    for (const Visit& visit : visits) {
      for (const Band& band : visit.bands) {
        if (band.query_begin > begin) continue;
        if (!is_triangle(band)) {
          of_others += others * ceil_div(band.num_keys(), tile.keys);
          of_last += ceil_div(band.num_keys(), tile.keys);
          continue;
        }
        // Each tile of rows sees keys up to its own end; the last one ends with the rows.
        of_others +=
            sum_of_quotients(others, begin + tile.rows + tile.keys - 1, tile.rows, tile.keys);
        of_last += ceil_div(end, tile.keys);
      }
    }
    const int64_t last_rows = end - begin - others * tile.rows;
    const int parts = static_cast<int>(ceil_div(last_rows, tile.rows_per_warpgroup));
    count += static_cast<double>(of_others) +
             static_cast<double>(of_last * warpgroups_cost(parts)) /
                 warpgroups_cost(tile.rows / tile.rows_per_warpgroup) +
             static_cast<double>((others + 1) * tile.overhead_keys) / tile.keys;
  }
  return count;
}

// Masked keys of the own block that each row computes, whatever the lengths: those up to its tile's
// last row, and from there up to the next tile of keys.
double masked_keys(const AttentionTile& tile) {
  return static_cast<double>(tile.rows + tile.keys - std::gcd(tile.rows, tile.keys)) / 2;
}

// Pairs in tiles if all segments filled theirs: the pairs of `RankTime`, masked pairs, and the
// overhead of tiles.
double pairs_without_padding(const std::vector<Visit>& visits, const Partition& partition,
                             int64_t rank, bool causal, const AttentionTile& tile) {
  const double rows = static_cast<double>(partition.length(rank));
  const double more = rows * static_cast<double>(tile.overhead_keys);
  if (causal && partition.layout() == Layout::kZigzag) {
    return rows * (static_cast<double>(partition.seq_len()) / 2 + masked_keys(tile)) + more;
  }
  double pairs = more;
  for (const Visit& visit : visits) {
    for (const Band& band : visit.bands) {
      pairs += is_triangle(band) ? rows * (rows / 2 + masked_keys(tile))
                                : static_cast<double>(band.num_pairs());
    }
  }
  return pairs;
}

// The orders to try, that of `start` first. Under zigzag, each rank innermost: its two segments are
// adjacent there, and one tile may hold an end of both. With few ranks, every order.
std::vector<Ranks> orders_of(const Partition& start, bool in_halves) {
  const int64_t world_size = start.world_size();
  std::vector<Ranks> orders = {start.order()};
  Ranks next(world_size);
  std::iota(next.begin(), next.end(), 0);
  if (world_size <= kMaxOrderedRanks) {
    do {
      if (next != start.order()) orders.push_back(next);
    } while (std::next_permutation(next.begin(), next.end()));
    return orders;
  }
  for (int64_t rank = 0; in_halves && rank < world_size; ++rank) {
    next = start.order();
    next.erase(std::find(next.begin(), next.end(), rank));
    next.push_back(rank);
    if (next != start.order()) orders.push_back(next);
  }
  return orders;
}

// Lengths near those of `start`, in units: each unit goes to the rank that then ends first, so that
// of equally slow splits the one is chosen whose other ranks end earliest. The remainder goes to
// `last`.
Ranks greedy_fill(const Partition& start, const std::vector<RankTime>& times, int64_t unit,
                  int64_t last) {
  Ranks lengths = start.lengths();
  int64_t left = start.seq_len();
  for (int64_t& length : lengths) {
    length = std::max<int64_t>(0, length / unit - 1) * unit;
    left -= length;
  }
  for (; left > 0; left -= unit) {
    const int64_t tokens = std::min(left, unit);
    const auto done = [&](int64_t rank) {
      const int64_t length = lengths[rank] + tokens;
      return length > times[rank].max_tokens ? std::numeric_limits<double>::infinity()
                                             : times[rank].time_ms(0, length);
    };
    int64_t first = last;
    for (int64_t rank = 0; tokens == unit && rank < start.world_size(); ++rank) {
      if (done(rank) < done(first)) first = rank;
    }
    lengths[first] += tokens;
  }
  return lengths;
}

}  // namespace

bool in_tiles(const std::vector<RankProfile>& profiles) {
  return std::any_of(profiles.begin(), profiles.end(),
                     [](const RankProfile& profile) { return !profile.tiles.empty(); });
}

std::vector<double> padding_ms(const Partition& partition, const Schedules& visits_of,
                               const std::vector<RankProfile>& profiles, const ModelCost& cost,
                               const Workload& workload) {
  std::vector<double> ms(profiles.size(), 0.0);
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    const RankProfile& profile = profiles[rank];
    if (profile.tiles.empty() || partition.length(rank) == 0) continue;
    const std::vector<Visit>& visits = visits_of[rank];
    double time = std::numeric_limits<double>::infinity();
    for (const AttentionTile& tile : profile.tiles) {
      time = std::min(time, tile.relative_cost * tiles_of(visits, partition.length(rank), tile));
    }
    const AttentionTile& first = profile.tiles.front();
    const double pairs =
        time / first.relative_cost * first.rows * first.keys -
        pairs_without_padding(visits, partition, rank, workload.mask.causal, first);
    ms[rank] = pairs * attention_flops(cost, workload) / (profile.attention_tflops * kFlopsPerMs);
  }
  return ms;
}

std::vector<double> busy_ms(const Partition& partition, const Schedules& visits_of,
                            const std::vector<RankTime>& times,
                            const std::vector<RankProfile>& profiles, const ModelCost& cost,
                            const Workload& workload) {
  auto ms = rank_ms(partition, times);
  const auto padding = padding_ms(partition, visits_of, profiles, cost, workload);
  for (size_t rank = 0; rank < ms.size(); ++rank) ms[rank] += padding[rank];
  return ms;
}

Partition fill_tiles(const Partition& start, const std::vector<RankTime>& times,
                     const std::vector<RankProfile>& profiles, const ModelCost& cost,
                     const Workload& workload) {
  const int64_t seq_len = start.seq_len(), world_size = start.world_size();
  if (!in_tiles(profiles) || world_size == 1) return start;
  std::set<int64_t> rows;  // of all kinds of tiles
  for (const RankProfile& profile : profiles) {
    for (const AttentionTile& tile : profile.tiles) rows.insert(tile.rows);
  }

  int64_t spent = 0;
  const auto ms_of = [&](const Partition& partition) {
    spent += world_size * world_size;
    return busy_ms(partition, schedules(partition, workload.mask), times, profiles, cost, workload);
  };
  std::vector<double> best_ms = ms_of(start);
  const double start_ms = slowest(best_ms);
  Partition best = start;
  const auto take_if_better = [&](const Ranks& lengths, const Ranks& order) {
    if (!has_room(times, lengths)) return;
    const Partition next(start.layout(), lengths, order);
    auto next_ms = ms_of(next);
    const double min_gain = order == best.order() ? kMinGain : kMinGainOfOrder;
    if (slowest(next_ms) >= slowest(best_ms) * (1 - min_gain)) return;
    best = next;
    best_ms = std::move(next_ms);
  };
  // Under zigzag each of a rank's two segments has tiles of its own.
  const bool in_halves = workload.mask.causal && start.layout() == Layout::kZigzag;
  const bool placed = workload.mask.causal && start.layout() == Layout::kContiguous;
  const Ranks even = even_lengths(seq_len, world_size);
  const int64_t fastest = fast_to_slow(times, seq_len).front();
  for (const Ranks& order : orders_of(start, in_halves)) {
    if (spent >= kBudget) break;
    if (order != start.order()) take_if_better(start.lengths(), order);
    take_if_better(even, order);
    for (const int64_t of_tile : rows) {
      const int64_t unit = in_halves ? 2 * of_tile : of_tile;
      if (placed) {
        take_if_better(best_lengths(times, order, seq_len, unit), order);
        continue;
      }
      // The remainder costs least on the innermost rank, where it starts only one more tile, or,
      // with few tokens, on the fastest rank.
      take_if_better(greedy_fill(start, times, unit, order.back()), order);
      take_if_better(greedy_fill(start, times, unit, fastest), order);
    }
  }
  // The slowest rank gives tokens to another one; ranks that end first are tried first.
  spent = 0;
  for (bool any = true; any && spent < kBudget;) {
    const Partition from = best;
    Ranks by_time(world_size);
    std::iota(by_time.begin(), by_time.end(), 0);
    std::stable_sort(by_time.begin(), by_time.end(),
                     [&](int64_t a, int64_t b) { return best_ms[a] < best_ms[b]; });
    const int64_t giver = by_time.back();
    by_time.pop_back();
    for (const int64_t receiver : by_time) {
      // The last step takes all its tokens.
      const int64_t max_step = std::min(kMaxSteps * kStep, from.length(giver) + kStep - 1);
      for (int64_t step = kStep; step <= max_step && spent < kBudget; step += kStep) {
        const int64_t tokens = std::min(step, from.length(giver));
        Ranks lengths = from.lengths();
        lengths[giver] -= tokens;
        lengths[receiver] += tokens;
        take_if_better(lengths, from.order());
      }
    }
    any = best.lengths() != from.lengths();
  }
  const bool is_even = start.lengths() == even && are_equal(times);
  return is_even && slowest(best_ms) >= start_ms * (1 - kMinGainOverEven) ? start : best;
}

}  // namespace ringattn
