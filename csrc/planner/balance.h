// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "planner/planner.h"

// Lengths with which unequal ranks end together, as if blocks took no time to travel: what the
// planner starts from.

namespace ringattn {

using Ranks = std::vector<int64_t>;  // an order of ranks, or tokens of each

// Coarser units are taken where they lose at most this share of the time to rounding.
inline constexpr double kUnitTolerance = 5e-3;
// Equal ranks part with equal lengths only for this much: what lengths cost beside the work, waits
// and unfilled tiles, is known less well than speeds.
inline constexpr double kLeastGainOverEven = 0.1;

/// The time of one rank as a function of what it owns.
struct RankTime {
  double overhead_ms = 0.0;
  double token_ms = 0.0;
  double pair_ms = 0.0;  // 0 where the time does not depend on where the tokens lie
  int64_t max_tokens = 0;

  /// Of `tokens` tokens after `before` others.
  double of(int64_t before, int64_t tokens) const;

  /// The inverse of that in real numbers: tokens that take `limit_ms`.
  double within(double before, double limit_ms) const;

  /// The most of `left` tokens that take at most `limit_ms`: all there is room for, or a multiple
  /// of `unit`.
  int64_t most(int64_t before, int64_t left, int64_t unit, double limit_ms) const;
};

/// Of one pair of a query and a key.
double attention_flops(const ModelCost& cost, const Workload& workload);

std::vector<RankTime> rank_times(int64_t seq_len, Layout layout,
                                 const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                 const Workload& workload);

/// [W]: the time of each rank.
std::vector<double> rank_ms(const Partition& partition, const std::vector<RankTime>& times);

double slowest(const std::vector<double>& ms);

/// Lengths that differ by at most one.
Ranks even_lengths(int64_t seq_len, int64_t world_size);

/// Whether all ranks work equally fast.
bool are_equal(const std::vector<RankTime>& times);

bool has_room(const std::vector<RankTime>& times, const Ranks& lengths);

/// The coarsest unit in which so many tokens are dealt out to so many ranks.
int64_t coarsest_unit(int64_t seq_len, int64_t world_size);

/// Largest, smallest, second largest, second smallest, ...: no two slow ranks side by side.
Ranks alternating(const Ranks& lengths);

Ranks fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len);

/// The lengths whose slowest rank is fastest, of all in this order and these units.
Ranks best_lengths(const std::vector<RankTime>& times, const Ranks& order, int64_t seq_len,
                   int64_t unit);

/// The partition whose slowest rank is fastest, in units that cost little; the even one where that
/// is as fast.
Partition best_partition(const std::vector<RankTime>& times, Layout layout, int64_t seq_len);

/// The same in real numbers, without overheads and limits of memory: in the order of `partition`,
/// or in a better one.
double ideal_ms(std::vector<RankTime> times, const Partition& partition);

}  // namespace ringattn
