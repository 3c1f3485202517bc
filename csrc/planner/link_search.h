// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "planner/balance.h"

// Lengths where ranks wait for blocks: a rank behind a slow link may gain less than its blocks
// cost, and tokens may have to be placed where they hide a transfer.

namespace ringattn {

/// Everything that decides the time of a ring call except the partition.
struct RingProblem {
  const std::vector<RankTime>& times;  // [W]
  const std::vector<RankProfile>& profiles;
  const ModelCost& cost;
  Workload workload;
  int64_t depth;

  /// [W]: the time of each rank without waits for blocks.
  std::vector<double> busy_ms(const Partition& partition) const;

  /// [W]: the time of each rank, waits for blocks included.
  std::vector<double> rank_ms(const Partition& partition) const;
};

/// `start`, or a faster partition. The search starts from lengths that would end together without
/// waits, for sets of ranks (all sets up to four ranks; above, each rank alone, and all ranks but
/// the k with the slowest links) in some orders (all orders up to three ranks). It improves the
/// best of them by moving tokens between ranks and by exchanging places of ranks. The result is not
/// slower than any start, but may be slower than partitions that are not tried: hardly ever up to
/// three ranks, often by a few percent at eight. With more than four ranks, the fast ones alone are
/// a start too where they are faster than the result so far. The work is bounded, and the same on
/// every rank.
Partition search_with_links(const Partition& start, const RingProblem& problem);

}  // namespace ringattn
