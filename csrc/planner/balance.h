// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "planner/planner.h"

// Lengths with which unequal ranks end together if blocks take no time to travel: the planner's
// start.

namespace ringattn {

using Ranks = std::vector<int64_t>;  // an order of ranks, or tokens of each

// Coarser units are used where rounding to them costs at most this share of the time.
inline constexpr double kUnitTolerance = 5e-3;
// Equal ranks get unequal lengths only for this gain: the cost of waits and of unfilled tiles is
// known less well than speeds.
inline constexpr double kMinGainOverEven = 0.1;

/// The time of one rank as a function of the tokens that it owns.
struct RankTime {
  double overhead_ms = 0.0;
  double token_ms = 0.0;
  double pair_ms = 0.0;  // 0 where the time does not depend on the position of the tokens
  int64_t max_tokens = 0;

  /// The time of `tokens` tokens after `before` others.
  double time_ms(int64_t before, int64_t tokens) const;

  /// The inverse in real numbers: tokens that take `limit_ms`.
  double tokens_within(double before, double limit_ms) const;

  /// The largest part of `left` tokens that takes at most `limit_ms`: all that fit the rank, or a
  /// multiple of `unit`.
  int64_t max_tokens_within(int64_t before, int64_t left, int64_t unit, double limit_ms) const;
};

/// For one pair of a query and a key.
double attention_flops(const ModelCost& cost, const Workload& workload);

std::vector<RankTime> rank_times(int64_t seq_len, Layout layout,
                                 const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                 const Workload& workload);

/// [W]: the time of each rank.
std::vector<double> rank_ms(const Partition& partition, const std::vector<RankTime>& times);

double slowest(const std::vector<double>& ms);

/// Lengths that differ by at most one.
Ranks even_lengths(int64_t seq_len, int64_t world_size);

/// Whether all ranks have equal speeds.
bool are_equal(const std::vector<RankTime>& times);

bool has_room(const std::vector<RankTime>& times, const Ranks& lengths);

/// The coarsest unit in which `seq_len` tokens are divided among `world_size` ranks.
int64_t coarsest_unit(int64_t seq_len, int64_t world_size);

/// The order largest, smallest, second largest, second smallest, ...: no two slow ranks are
/// adjacent.
Ranks alternating(const Ranks& lengths);

Ranks fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len);

/// The lengths in this order and unit whose slowest rank is fastest.
Ranks best_lengths(const std::vector<RankTime>& times, const Ranks& order, int64_t seq_len,
                   int64_t unit);

/// The partition whose slowest rank is fastest, in units that cost little; the even one where it is
/// as fast.
Partition best_partition(const std::vector<RankTime>& times, Layout layout, int64_t seq_len);

/// The time of the best partition into real numbers of tokens, without overheads and memory limits,
/// in the order of `partition` or a better one.
double ideal_ms(std::vector<RankTime> times, const Partition& partition);

}  // namespace ringattn
