// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"
#include "partition/partition.h"

namespace ringattn {

/// The order in which blocks of keys visit the ranks: that of the keys' partition. Ranks without
/// tokens come last, since no rows of theirs travel: no other rank loses a step to them.
class RINGATTN_API VisitOrder {
 public:
  /// A rank has tokens where one of the partitions gives it some.
  VisitOrder(const Partition& queries, const Partition& keys);

  /// The rank whose block `rank` attends at `step` of a ring, 0 .. W-1: its own, then those of the
  /// ranks before it, cyclic.
  int64_t source_at(int64_t rank, int64_t step) const { return after(rank, -step); }
  /// The rank that attends the block of `rank` at `step`, if both have tokens.
  int64_t destination_at(int64_t rank, int64_t step) const { return after(rank, step); }

 private:
  int64_t after(int64_t rank, int64_t distance) const;

  std::vector<int64_t> ranks_;  // [W], those without tokens last
  std::vector<int64_t> place_;  // [W], inverse of ranks_
  int64_t num_active_ = 0;      // ranks with tokens
};

}  // namespace ringattn
