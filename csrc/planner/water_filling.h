// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partition/partition.h"
#include "planner/time_model.h"

// Lengths with which unequal ranks end together, without padding and waits.

namespace ringattn {

using Lengths = std::vector<int64_t>;    // [W]: tokens of each rank
using RankOrder = std::vector<int64_t>;  // [W]: ranks

// Coarser units are used where rounding to them costs at most this share of the time.
inline constexpr double kUnitTolerance = 5e-3;

/// Lengths that differ by at most one.
Lengths even_lengths(int64_t seq_len, int64_t world_size);

/// The coarsest unit in which `seq_len` tokens are divided among `world_size` ranks.
int64_t coarsest_unit(int64_t seq_len, int64_t world_size);

/// The order largest, smallest, second largest, second smallest, ...: no two slow ranks are
/// adjacent.
RankOrder alternating(const Lengths& lengths);

RankOrder fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len);

/// The lengths in this order and unit whose slowest rank is fastest.
Lengths best_lengths(const std::vector<RankTime>& times, const RankOrder& order, int64_t seq_len,
                     int64_t unit);

Partition fill_ranks_in(const TimeModel& model, const RankOrder& order);

/// The partition whose slowest rank is fastest by `smooth_ms`, in units that cost
/// little.
Partition fill_ranks(const TimeModel& model);

/// The time of the best partition into real numbers of tokens, without overheads and memory limits.
double ideal_ms(const TimeModel& model);

}  // namespace ringattn
