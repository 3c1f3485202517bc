// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/query_bounds.h"
#include "core/ceil_div.h"

// How many thread blocks share the heads of a group, and which tiles are processed together. Plain
// C++, which tests run without a device.

namespace ringattn::cuda::sm90 {

/// How many clusters of one, two and four thread blocks run at one time. Those of four are fewer
/// than a quarter of the multiprocessors where a group of these has an odd number.
struct Residency {
  int of_one = 0, of_two = 0, of_four = 0;

  int clusters(int ranks) const { return ranks == 1 ? of_one : ranks == 2 ? of_two : of_four; }
  /// Of fewer multiprocessors.
  Residency within(int multiprocessors) const {
    return {std::min(of_one, multiprocessors), std::min(of_two, multiprocessors / 2),
            std::min(of_four, multiprocessors / 4)};
  }
};

/// The work tiles of a call: for each tile of keys, one of every plane.
struct WorkTiles {
  QueryBounds bounds;  // without a table
  int planes;
  int num_key_tiles;
  int block_q, block_k;
  int heads;  // of a group

  /// What a work tile costs beside its steps, in steps: loads of its keys, its sums over a cluster.
  static constexpr int kOverhead = 4;

  int64_t count() const { return int64_t{planes} * num_key_tiles; }
  /// A step is one query tile of one head.
  int64_t steps(int64_t work_tile, int ranks) const {
    const int key = static_cast<int>(work_tile / planes) * block_k;
    const int64_t query_tiles =
        ceil_div(bounds.num_queries, block_q) - bounds.range(key).begin / block_q;
    return query_tiles * (heads / ranks) + kOverhead;
  }
  /// Of a cluster, where all have as much to do. Lengths of tiles are linear in their order.
  int64_t mean_steps(int ranks, int clusters) const {
    return (steps(0, ranks) + steps(count() - 1, ranks)) * count() / (2 * clusters);
  }
};

/// The work tiles of a call. Those of a table have any lengths, which the host does not know: all
/// count as whole.
template <typename Tile>
WorkTiles work_tiles_of(const BlockAttentionBackwardParams& p) {
  const auto num_key_tiles = static_cast<int>(ceil_div(p.num_keys, Tile::kClusterKeys));
  return {QueryBounds::on_host(p), p.batch * p.num_kv_heads, num_key_tiles,
          Tile::kBlockQ,           Tile::kClusterKeys,       p.num_heads / p.num_kv_heads};
}

/// Whether thread blocks had better take tiles of these lengths when they are done with one, where
/// nothing else runs on the device: lengths are unequal, and even out over many tiles.
inline bool gains_by_tickets(const WorkTiles& tiles, int thread_blocks) {
  constexpr int kMany = 6;  // for each thread block
  return tiles.count() >= int64_t{kMany} * thread_blocks &&
         tiles.steps(0, 1) > 2 * tiles.steps(tiles.count() - 1, 1);
}

/// The steps of a cluster that has a work tile in each round, in alternating direction.
inline int64_t steps_of_cluster(const WorkTiles& tiles, int ranks, int clusters, int cluster) {
  int64_t steps = 0, first = 0;
  for (bool descending = true; first < tiles.count(); first += clusters, descending = !descending) {
    const int64_t work_tile = first + (descending ? cluster : clusters - 1 - cluster);
    if (work_tile < tiles.count()) steps += tiles.steps(work_tile, ranks);
  }
  return steps;
}

/// The most steps of a cluster. Lengths of tiles are linear in their order, so the busiest one is
/// the first, the last, or on either side of where the last round ends.
inline int64_t busiest_steps(const WorkTiles& tiles, int ranks, int clusters) {
  const int64_t rounds = ceil_div(tiles.count(), clusters);
  const int left = static_cast<int>(tiles.count() - (rounds - 1) * clusters);
  const int edge = rounds % 2 == 1 ? left : clusters - left;
  int64_t most = 0;
  for (const int cluster : {0, edge - 1, edge, clusters - 1}) {
    if (cluster < 0 || cluster >= clusters) continue;
    most = std::max(most, steps_of_cluster(tiles, ranks, clusters, cluster));
  }
  return most;
}

/// The most steps of thread blocks, or clusters of some that share the heads of a group.
///   by_ticket  whether single thread blocks take tiles when they are done with one
inline int64_t most_steps(const WorkTiles& tiles, int ranks, const Residency& resident,
                          bool by_ticket) {
  const bool evens_out = by_ticket && ranks == 1 && tiles.count() > resident.of_one;
  return evens_out ? tiles.mean_steps(1, resident.of_one)
                   : busiest_steps(tiles, ranks, resident.clusters(ranks));
}

/// Where there are few tiles of keys, the thread blocks of a cluster share the heads of a group:
/// 1, 2 or 4, with which the busiest one makes the fewest steps. Many tiles are left as they are.
inline int choose_ranks(const WorkTiles& tiles, const Residency& resident, bool by_ticket) {
  constexpr int kMany = 4;  // for each thread block
  if (tiles.count() >= int64_t{kMany} * resident.of_one) return 1;
  int best = 1;
  int64_t fewest = most_steps(tiles, 1, resident, by_ticket);
  for (int ranks = 2; ranks <= 4 && tiles.heads % ranks == 0; ranks *= 2) {
    if (resident.clusters(ranks) == 0) break;
    const int64_t steps = most_steps(tiles, ranks, resident, by_ticket);
    if (steps < fewest) {
      fewest = steps;
      best = ranks;
    }
  }
  return best;
}

/// Whether pairs of thread blocks end before single ones, or clusters that share heads, on a device
/// that all can fill. Their tiles of keys are longer, but each step adds half as much into dq.
///   tiles    of a thread block
///   pairs    of a pair
///   in_turn  whether tiles add to dq one after the other (turns.cuh): pairs make half the waits
inline bool gains_by_pairs(const WorkTiles& tiles, const WorkTiles& pairs, int thread_blocks,
                           bool in_turn) {
  const int percent = in_turn ? 90 : 96;  // of the time of a step of one thread block, measured
  if (thread_blocks < 2) return false;
  const Residency all = {thread_blocks, thread_blocks / 2, thread_blocks / 4};
  const bool by_ticket = !in_turn && gains_by_tickets(tiles, thread_blocks);
  const int64_t alone = most_steps(tiles, choose_ranks(tiles, all, by_ticket), all, by_ticket);
  return percent * busiest_steps(pairs, 1, all.of_two) < 100 * alone;
}

/// Whether pairs compute it, where no tickets are asked for: pairs have neither tables nor a
/// softcap.
template <typename Tile, typename Pair>
bool wants_pairs(const BlockAttentionBackwardParams& p, int thread_blocks) {
  return p.query_ranges == nullptr && p.softcap == 0.0f &&
         gains_by_pairs(work_tiles_of<Tile>(p), work_tiles_of<Pair>(p), thread_blocks,
                        p.deterministic);
}

/// The planes of a slice, whose work tiles are processed before those of the next one. With few,
/// the query rows under way stay in L2; with too few, thread blocks idle in a round that is not
/// full, or that no other one evens out. So many as fill 1, 2, 4 or 8 rounds: the fewest with which
/// the busiest cluster makes hardly more steps than the mean.
///   least_rounds  where slices have a price
inline int choose_planes_per_slice(const WorkTiles& tiles, int ranks, int clusters,
                                   int least_rounds) {
  const int64_t mean = tiles.mean_steps(ranks, clusters);
  int best = 1;
  int64_t fewest = INT64_MAX;
  for (int rounds = least_rounds; rounds <= 8; rounds *= 2) {
    const int planes = std::clamp(rounds * clusters / tiles.num_key_tiles, 1, tiles.planes);
    const auto steps_of_slice = [&](int of_slice) {
      WorkTiles slice = tiles;
      slice.planes = of_slice;
      return of_slice == 0 ? 0 : busiest_steps(slice, ranks, clusters);
    };
    const int64_t steps =
        tiles.planes / planes * steps_of_slice(planes) + steps_of_slice(tiles.planes % planes);
    if (steps < fewest) {
      fewest = steps;
      best = planes;
    }
    if (fewest <= mean + mean / 25 || planes == tiles.planes) break;
  }
  return best;
}

/// The same for tiles of any lengths, by ticket: they even out over more of them.
inline int planes_per_slice_by_ticket(const WorkTiles& tiles, int multiprocessors) {
  constexpr int kTiles = 7;  // of each multiprocessor, at least
  return static_cast<int>(std::min<int64_t>(
      tiles.planes, ceil_div(int64_t{kTiles} * multiprocessors, tiles.num_key_tiles)));
}

}  // namespace ringattn::cuda::sm90
