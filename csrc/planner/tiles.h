// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partition/schedule.h"
#include "planner/balance.h"

// Attention kernels compute whole tiles. Where a rank's pieces do not fill theirs, it works on rows
// and keys that are not there: of a few thousand tokens that is more than what balance gains.

namespace ringattn {

/// Whether attention of any rank computes whole tiles.
bool in_tiles(const std::vector<RankProfile>& profiles);

/// [W]: what attention of each rank takes, in ms, beyond lengths whose pieces are whole tiles: rows
/// of each of its pieces, and keys of each block that they see, are rounded up to whole ones of
/// those of `RankProfile::tiles` that are done first. 0 without tiles.
std::vector<double> padding_ms(const Partition& partition, const Schedules& visits_of,
                               const std::vector<RankProfile>& profiles, const ModelCost& cost,
                               const Workload& workload);

/// [W]: the time of each rank that waits for nothing, padding included.
std::vector<double> busy_ms(const Partition& partition, const Schedules& visits_of,
                            const std::vector<RankTime>& times,
                            const std::vector<RankProfile>& profiles, const ModelCost& cost,
                            const Workload& workload);

/// `start`, or lengths whose slowest rank is faster by `busy_ms`: whole tiles, which end together
/// as nearly as they can, in some orders (all of up to three ranks), and what tokens moved between
/// ranks make of them. Even lengths are kept unless others are a tenth faster.
Partition fill_tiles(const Partition& start, const std::vector<RankTime>& times,
                     const std::vector<RankProfile>& profiles, const ModelCost& cost,
                     const Workload& workload);

}  // namespace ringattn
