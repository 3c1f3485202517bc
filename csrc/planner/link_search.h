// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "planner/balance.h"

// Lengths where blocks are waited for: a rank at the end of a slow link may be worth less than what
// its blocks cost, and tokens may have to lie where they hide a transfer.

namespace ringattn {

/// What decides how long a ring call takes, but for who owns what.
struct RingProblem {
  const std::vector<RankTime>& times;  // [W]
  const std::vector<RankProfile>& profiles;
  const ModelCost& cost;
  Workload workload;
  int64_t depth;

  /// [W]: the time of each rank if blocks were there at once.
  std::vector<double> busy_ms(const Partition& partition) const;

  /// [W]: the time of each rank, waits for blocks included.
  std::vector<double> rank_ms(const Partition& partition) const;
};

/// `start`, or what is faster. Begins with lengths that would end together if nobody waited, of
/// sets of ranks (all of them up to four ranks; above, each rank alone, and those without the k at
/// the slowest links) in some orders (all of them up to three ranks), and improves the best of
/// these by moving tokens between ranks and ranks between places. What it finds is not slower than
/// any of the first, but may be than partitions it does not meet: up to three ranks hardly ever, at
/// eight ranks often by a few percent. Of more than four ranks, the fast ones alone are a beginning
/// too where they are faster than what was found. The work is bounded, and the same wherever it
/// runs.
Partition search_with_links(const Partition& start, const RingProblem& problem);

}  // namespace ringattn
