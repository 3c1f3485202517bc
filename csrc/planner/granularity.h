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

/// Each of `starts`, or lengths whose slowest rank is faster by `TimeModel::step_ms`: lengths in
/// whole tiles that end as close together as they can, in some orders (all for up to three ranks),
/// improved by moving tokens from the slowest rank to others. The work for all starts together is
/// bounded, and the same on every rank.
std::vector<Partition> improve_lengths(const std::vector<Partition>& starts, const TimeModel& model,
                                       int64_t depth);

}  // namespace ringattn
