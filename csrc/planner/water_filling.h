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

/// Lengths that differ by at most one.
Lengths even_lengths(int64_t seq_len, int64_t world_size);

/// The unit in which tokens are divided among ranks: at most 1/256 of the mean share, so that ranks
/// end later by no more than that.
int64_t coarsest_unit(int64_t seq_len, int64_t world_size);

/// The order largest, smallest, second largest, second smallest, ...: no two slow ranks are
/// adjacent.
RankOrder alternating(const Lengths& lengths);

RankOrder fast_to_slow(const std::vector<RankTime>& times, int64_t seq_len);

/// The lengths in this order and unit whose slowest rank is fastest.
Lengths best_lengths(const std::vector<RankTime>& times, const RankOrder& order, int64_t seq_len,
                     int64_t unit);

/// The partition whose slowest rank is fastest by `smooth_ms`, in `coarsest_unit`; in this order.
Partition fill_ranks(const TimeModel& model);
Partition fill_ranks_in(const TimeModel& model, const RankOrder& order);

/// The time of the best partition into real numbers of tokens, without overheads and memory limits.
double ideal_ms(const TimeModel& model);

}  // namespace ringattn
