// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"
#include "partition/partition.h"
#include "partition/schedule.h"
#include "planner/profile.h"

// Simulates a ring call over unequal ranks.

namespace ringattn {

/// When each rank has attended its last block, in ms from the common start: attention, transfers
/// and waits for them.
///
/// A block goes from its owner directly to its reader. The message of step t starts once both have
/// attended step t - 1 - depth and their earlier messages have ended; what a rank sends and
/// receives at one step is one exchange. So a rank waits for the computation of other ranks only
/// through the two that it exchanges with, and with depth W - 1 no rank waits for computation.
/// (Where blocks are forwarded from rank to rank, the rule differs: the longest shard must not be
/// longer than any depth + 1 adjacent ones together.)
RINGATTN_API std::vector<double> simulate_ring(const Partition& partition,
                                               const std::vector<RankProfile>& profiles,
                                               const ModelCost& cost, Mask mask, int64_t depth);

/// The time in it that each rank waits for blocks, in ms; 0 where no block is late.
std::vector<double> simulate_waits(const Schedules& visits_of,
                                   const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                   int64_t depth);

/// Tokens whose keys and values a ring call holds on `rank` beside its shard: the staged copy of
/// its block, and one buffer for each block in flight and for the one being attended.
RINGATTN_API int64_t buffered_tokens(const Partition& partition, int64_t rank, Mask mask,
                                     int64_t depth);

}  // namespace ringattn
