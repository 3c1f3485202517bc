// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/hop_plan.h"
#include "partition/mask.h"
#include "partition/partition.h"

namespace ringattn {

/// How query rows see key rows.
enum class Visibility : int8_t {
  kAll,        // each sees all
  kTriangle,   // row i sees rows 0 .. i
  kIntervals,  // row i sees an interval of its own: key_ranges() of the two blocks
};

/// One step of a rank's schedule: which of its rows attend to which rows of a block.
struct RINGATTN_API Visit {
  int64_t source = 0;  // the rank that owns the block
  // The rows that see or are seen; no pair outside of them is visible. Empty where nothing is.
  RowRange queries;
  RowSet keys;                               // without gaps of the rank's own block
  Visibility visibility = Visibility::kAll;  // of these rows
  int64_t num_pairs = 0;                     // of a query and a visible key

  // Rows of this rank that attend to no later block: their result is complete.
  RowRange final;

  bool visible() const { return num_pairs > 0; }
};

/// The rows of a rank's queries at their positions among the keys. The queries of all ranks are the
/// last ones: query t is at position keys.seq_len() - queries.seq_len() + t.
RINGATTN_API BlockRows query_rows(const Partition& queries, const Partition& keys, int64_t rank);

/// The schedule of `rank`: one visit for each step, with the block of VisitOrder::source_at, also
/// where nothing is visible. `queries` and `keys` say which rows the ranks have of either; there
/// are at most as many queries as keys.
///
/// A plain mask needs rectangles and triangles alone where it is not causal, and under zigzag and
/// contiguous that are the same for both sides: `queries` ends with the rank's last row there, and
/// no masked pair is computed. In all other cases `queries` are all rows of the rank in every
/// visible step, and all are final in the last of them.
RINGATTN_API std::vector<Visit> schedule(const Partition& queries, const Partition& keys,
                                         int64_t rank, const Mask& mask);
/// Of one partition for queries and keys.
RINGATTN_API std::vector<Visit> schedule(const Partition& partition, int64_t rank,
                                         const Mask& mask);

/// The schedules of all ranks, [W][W].
using Schedules = std::vector<std::vector<Visit>>;
Schedules schedules(const Partition& partition, const Mask& mask);

/// What `rank` sends and receives for that: hops[i] belongs to step i + 1, [W - 1].
RINGATTN_API std::vector<HopPlan> plan_hops(const Partition& queries, const Partition& keys,
                                            int64_t rank, const Mask& mask);
RINGATTN_API std::vector<HopPlan> plan_hops(const Partition& partition, int64_t rank,
                                            const Mask& mask);

}  // namespace ringattn
