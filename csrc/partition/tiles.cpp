// SPDX-License-Identifier: Apache-2.0
#include "partition/tiles.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "partition/schedule.h"

namespace ringattn {
namespace {

constexpr int64_t kBudget = 1 << 14;     // in blocks that are looked at, W^2 for a partition
constexpr int64_t kMaxOrderedRanks = 3;  // up to so many, every order
constexpr double kLeastGain = 1e-6;      // relative

int64_t tiles(int64_t tokens, int64_t tile) { return (tokens + tile - 1) / tile; }

// Pairs in the tiles that `visits` come to. All visits are one launch, whose tiles of rows do not
// reach across the row from which on later owners' blocks are seen.
double pairs_in_tiles(const std::vector<Visit>& visits, int64_t num_rows, int64_t tile) {
  int64_t split = 0;
  for (const Visit& visit : visits) split = std::max(split, visit.query_begin);
  int64_t count = 0;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, split}, std::pair{split, num_rows}}) {
    const int64_t of_rows = tiles(end - begin, tile);
    for (const Visit& visit : visits) {
      if (!visit.visible() || of_rows == 0 || visit.query_begin > begin) continue;
      if (!visit.diagonal) {
        count += of_rows * tiles(visit.key_end, tile);
        continue;
      }
      // Each tile of rows sees one more tile of keys than the one before; the last ends with them.
      const int64_t others = of_rows - 1;
      count += others * tiles(begin, tile) + others * (others + 1) / 2 + tiles(end, tile);
    }
  }
  return static_cast<double>(count) * static_cast<double>(tile * tile);
}

// The same, if all pieces were whole tiles: what `RankTime` counts, and half a tile for each row
// under the mask of the own block, which no lengths avoid.
double pairs_without_padding(const std::vector<Visit>& visits, const Partition& partition,
                             int64_t rank, bool causal, int64_t tile) {
  const double rows = static_cast<double>(partition.length(rank));
  if (causal && partition.layout() == Layout::kZigzag) {
    return rows * static_cast<double>(partition.seq_len() + tile) / 2;
  }
  double pairs = 0.0;
  for (const Visit& visit : visits) {
    pairs += visit.diagonal ? rows * (rows + static_cast<double>(tile)) / 2
                            : static_cast<double>(visit.num_queries() * visit.key_end);
  }
  return pairs;
}

// This order first. Under zigzag, each rank innermost: its halves lie side by side, and one tile
// may hold an end of both. Of few ranks, every order.
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

// About the lengths of `start`, in units: each goes to whoever is then done first, so that of
// equally slow splits it is the one whose other ranks are done earliest. What no unit holds goes to
// `last`.
Ranks deal(const Partition& start, const std::vector<RankTime>& times, int64_t unit, int64_t last) {
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
                                             : times[rank].of(0, length);
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

std::vector<double> padding_ms(const Partition& partition, const std::vector<RankProfile>& profiles,
                               const ModelCost& cost, const Workload& workload) {
  std::vector<double> ms(profiles.size(), 0.0);
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    const RankProfile& profile = profiles[rank];
    if (profile.tile_tokens == 1 || partition.length(rank) == 0) continue;
    const auto visits = schedule(partition, rank, workload.causal);
    const double pairs =
        pairs_in_tiles(visits, partition.length(rank), profile.tile_tokens) -
        pairs_without_padding(visits, partition, rank, workload.causal, profile.tile_tokens);
    ms[rank] = pairs * attention_flops(cost, workload) / (profile.attention_tflops * kFlopsPerMs);
  }
  return ms;
}

std::vector<double> busy_ms(const Partition& partition, const std::vector<RankTime>& times,
                            const std::vector<RankProfile>& profiles, const ModelCost& cost,
                            const Workload& workload) {
  auto ms = rank_ms(partition, times);
  const auto padding = padding_ms(partition, profiles, cost, workload);
  for (size_t rank = 0; rank < ms.size(); ++rank) ms[rank] += padding[rank];
  return ms;
}

Partition fill_tiles(const Partition& start, const std::vector<RankTime>& times,
                     const std::vector<RankProfile>& profiles, const ModelCost& cost,
                     const Workload& workload) {
  int64_t tile = 1;
  for (const RankProfile& profile : profiles) tile = std::max(tile, profile.tile_tokens);
  const int64_t seq_len = start.seq_len(), world_size = start.world_size();
  if (tile == 1 || world_size == 1) return start;

  int64_t spent = 0;
  const auto ms = [&](const Partition& partition) {
    spent += world_size * world_size;
    return slowest(busy_ms(partition, times, profiles, cost, workload));
  };
  const double start_ms = ms(start);
  Partition best = start;
  double best_ms = start_ms;
  // Under zigzag both halves of a rank's tokens have tiles of their own.
  const bool in_halves = workload.causal && start.layout() == Layout::kZigzag;
  const bool placed = workload.causal && start.layout() == Layout::kContiguous;
  const int64_t unit = in_halves ? 2 * tile : tile;
  const Ranks even = even_lengths(seq_len, world_size);
  for (const Ranks& order : orders_of(start, in_halves)) {
    if (spent >= kBudget) break;
    // What no unit holds costs least where only one more tile begins: innermost.
    const Ranks whole =
        placed ? best_lengths(times, order, seq_len, unit) : deal(start, times, unit, order.back());
    for (const Ranks& lengths : {whole, start.lengths(), even}) {
      if (!has_room(times, lengths)) continue;
      const Partition next(start.layout(), lengths, order);
      const double next_ms = ms(next);
      if (next_ms >= best_ms * (1 - kLeastGain)) continue;
      best = next;
      best_ms = next_ms;
    }
  }
  const bool is_even = start.lengths() == even;
  return is_even && best_ms >= start_ms * (1 - kLeastGainOverEven) ? start : best;
}

}  // namespace ringattn
