// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partition/schedule.h"
#include "planner/balance.h"

// Attention kernels compute whole tiles. Where a rank's segments do not fill their tiles, it
// computes rows and keys that do not exist: with a few thousand tokens this costs more than balance
// gains.

namespace ringattn {

/// Whether the profile of any rank has tiles.
bool in_tiles(const std::vector<RankProfile>& profiles);

/// [W]: the time in ms that attention of each rank takes beyond lengths that fill their tiles: rows
/// of each of its segments, and visible keys of each block, are rounded up to the tiles of
/// `RankProfile::tiles` with the least total time. 0 without tiles.
std::vector<double> padding_ms(const Partition& partition, const Schedules& visits_of,
                               const std::vector<RankProfile>& profiles, const ModelCost& cost,
                               const Workload& workload);

/// [W]: the time of each rank without waits, padding included.
std::vector<double> busy_ms(const Partition& partition, const Schedules& visits_of,
                            const std::vector<RankTime>& times,
                            const std::vector<RankProfile>& profiles, const ModelCost& cost,
                            const Workload& workload);

/// `start`, or lengths whose slowest rank is faster by `busy_ms`: lengths in whole tiles that end
/// as close together as they can, in some orders (all for up to three ranks), improved by moving
/// tokens between ranks. Even lengths are kept unless others are a tenth faster.
Partition fill_tiles(const Partition& start, const std::vector<RankTime>& times,
                     const std::vector<RankProfile>& profiles, const ModelCost& cost,
                     const Workload& workload);

}  // namespace ringattn
