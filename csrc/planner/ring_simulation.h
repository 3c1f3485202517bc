// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/export.h"
#include "partition/partition.h"
#include "partition/schedule.h"

// Simulates the exchange of blocks in a ring call over unequal ranks.

namespace ringattn {

/// What a visit of a rank takes, in ms.
using VisitTime = std::function<double(int64_t rank, const Visit& visit)>;

/// [W]: the time in a ring call that each rank waits for blocks, in ms; 0 where no block is late.
///
/// A block goes from its owner directly to its reader. The message of step t starts once both have
/// attended step t - 1 - depth and their earlier messages have ended; what a rank sends and
/// receives at one step is one exchange. So a rank waits for the computation of other ranks only
/// through the two that it exchanges with, and with depth W - 1 no rank waits for computation.
std::vector<double> simulate_waits(const Schedules& visits_of, const VisitTime& attend_ms,
                                   const VisitTime& transfer_ms, int64_t depth);

/// The same in its backward (`ring_backward`). A rank attends to the first visiting block when it
/// is there, to the others when all are, and to its own last. The gradients of a block go back to
/// its owner when both ranks have attended to their blocks of that step, and have exchanged those
/// of earlier steps. Both wait for them at the end, or at that of a round of kStepsOfRound steps.
std::vector<double> simulate_backward_waits(const Schedules& visits_of, const VisitTime& attend_ms,
                                            const VisitTime& transfer_ms,
                                            const VisitTime& return_ms);

/// Tokens whose keys and values a ring call holds on `rank` beside its shard: the staged copy of
/// its block, and one buffer for each block in flight and for the one being attended.
RINGATTN_API int64_t buffered_tokens(const Partition& partition, int64_t rank, const Mask& mask,
                                     int64_t depth);

/// Tokens whose gradients of keys and values its backward holds: of the shard, and for each way a
/// buffer for each step, of kStepsOfRound at most.
RINGATTN_API int64_t gradient_tokens(const Partition& partition, int64_t rank, const Mask& mask);

}  // namespace ringattn
