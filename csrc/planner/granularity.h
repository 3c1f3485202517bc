// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partition/partition.h"
#include "planner/time_model.h"

// Attention kernels compute whole tiles. Where a rank's segments do not fill their tiles, it
// computes rows and keys that do not exist: with a few thousand tokens this costs more than balance
// gains. Waits for blocks depend on lengths as unevenly.

namespace ringattn {

/// Improves each start, by the time of its slowest rank (`TimeModel::step_ms`). First tries lengths
/// in whole tiles, in several orders; then moves tokens between ranks. Returns the start where
/// nothing is faster. The work for all starts together is bounded, and the same on every rank.
std::vector<Partition> improve_lengths(const std::vector<Partition>& starts, const TimeModel& model,
                                       int64_t depth);

}  // namespace ringattn
