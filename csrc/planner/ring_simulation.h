// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"
#include "partition/partition.h"
#include "partition/schedule.h"
#include "planner/profile.h"

// What a ring call does over unequal ranks, without running it.

namespace ringattn {

/// When each rank is done with its last block, in ms from the start, which is one for all.
/// Attention alone; transfers and the waits for them are in it.
///
/// A block goes from its owner straight to its reader. The message of step t moves once both have
/// attended to step t - 1 - depth and are done with the messages before it; what a rank sends and
/// receives at one step is one exchange. So nobody waits for third ranks' computation but through
/// the two it exchanges with, and with depth W - 1 nobody waits for a rank that computes. (Where
/// blocks are handed on from neighbour to neighbour, the rule is another one: the longest shard
/// must not be longer than any depth + 1 adjacent ones together.)
RINGATTN_API std::vector<double> simulate_ring(const Partition& partition,
                                               const std::vector<RankProfile>& profiles,
                                               const ModelCost& cost, bool causal, int64_t depth);

/// The part of that for which attention of each rank stands still, in ms: it waits for blocks. None
/// where nothing delays any.
std::vector<double> simulate_waits(const Schedules& visits_of,
                                   const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                   int64_t depth);

/// Tokens whose keys and values a ring call holds on `rank` beside its own: its block as it is
/// sent, and one buffer for each block in flight and the one being attended.
RINGATTN_API int64_t buffered_tokens(const Partition& partition, int64_t rank, bool causal,
                                     int64_t depth);

}  // namespace ringattn
