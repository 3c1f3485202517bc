// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/band.h"
#include "core/hop_plan.h"
#include "partition/mask.h"
#include "partition/partition.h"

namespace ringattn {

/// One step of a rank's schedule: which of its rows attend to which rows of a block.
struct RINGATTN_API Visit {
  int64_t source = 0;       // the rank that owns the block
  std::vector<Band> bands;  // each has a visible pair; no pair is in two of them

  // Rows [final_begin, final_end) of this rank attend to no later block: their result is complete.
  int64_t final_begin = 0;
  int64_t final_end = 0;

  bool visible() const { return !bands.empty(); }
  /// Leading rows of the block that hold every key of the bands.
  int64_t rows_used() const;
  /// Pairs of a query and a visible key.
  int64_t num_pairs() const;
};

/// The schedule of `rank`: one visit for each step, with the block of Partition::source_at, also
/// where nothing is visible. Causal and full masks need one band a visit, dense or under diagonal
/// 0, that ends with the rank's last row: no masked pair is computed.
RINGATTN_API std::vector<Visit> schedule(const Partition& partition, int64_t rank, Mask mask);

/// The schedules of all ranks, [W][W].
using Schedules = std::vector<std::vector<Visit>>;
Schedules schedules(const Partition& partition, Mask mask);

/// What `rank` sends and receives for that: hops[i] belongs to step i + 1, [W - 1].
RINGATTN_API std::vector<HopPlan> plan_hops(const Partition& partition, int64_t rank, Mask mask);

/// Leading key rows of the block of `source` that the schedule of `rank` uses.
RINGATTN_API int64_t rows_used(const Partition& partition, int64_t rank, int64_t source, Mask mask);

}  // namespace ringattn
