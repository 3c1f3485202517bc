// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/hop_plan.h"
#include "partition/mask.h"
#include "partition/partition.h"

namespace ringattn {

/// How query rows see key rows.
enum class Visibility : int8_t {
  kAll,        // each sees all
  kTriangle,   // row i sees rows 0 .. i + diagonal
  kSplit,      // rows from `split` on see all, rows before it the first `early_keys`
  kIntervals,  // row i sees an interval of its own: key_ranges() of the two blocks
};

/// Query rows and key rows of a visit that meet under one diagonal or none.
struct VisitPart {
  // Of the rank's rows, up to the last one. Parts that do not begin with row 0 begin with one row
  // in all visits of a schedule.
  RowRange queries;
  RowRange keys;                    // of the keys that are seen, the first of which is row 0
  std::optional<int64_t> diagonal;  // row i of these sees key j of these when j - i <= diagonal
};

/// One step of a rank's schedule: which of its rows attend to which rows of a block.
struct RINGATTN_API Visit {
  int64_t source = 0;  // the rank that owns the block
  // The rows that see or are seen; no pair outside of them is visible. Empty where nothing is.
  // `queries` end with the rank's last row.
  RowRange queries;
  RowSet keys;                               // without gaps of the rank's own block
  Visibility visibility = Visibility::kAll;  // of these rows
  int64_t diagonal = 0;                      // of kTriangle; not negative
  int64_t split = 0;                         // of kSplit: a row of the rank, inside of `queries`
  int64_t early_keys = 0;                    // of kSplit; neither 0 nor all
  int64_t num_pairs = 0;                     // of a query and a visible key

  // Rows of this rank that attend to no later block: their result is complete.
  RowRange final;

  bool visible() const { return num_pairs > 0; }
  /// The keys in ascending order: two parts of kSplit, rectangles both; none where nothing is
  /// visible; else one.
  std::vector<VisitPart> parts() const;
};

/// The rows of a rank's queries at their positions among the keys. The queries of all ranks are the
/// last ones: query t is at position keys.seq_len() - queries.seq_len() + t.
RINGATTN_API BlockRows query_rows(const Partition& queries, const Partition& keys, int64_t rank);

/// The schedule of `rank`: one visit for each step, with the block of VisitOrder::source_at, also
/// where nothing is visible. `queries` and `keys` say which rows the ranks have of either; there
/// are at most as many queries as keys.
///
/// Later steps fold into earlier results: the first visible one has all rows of the rank.
///
/// Under a plain mask no step is kIntervals where the others suffice for all steps of the rank:
/// without a causal mask; under zigzag and contiguous that are the same for both sides, or with any
/// earlier rows before a rank's own, as of a prompt's chunk; in stripes. No masked pair is computed
/// then but in tiles of triangles. In all other cases each visible step is kIntervals, `queries`
/// are all rows of the rank, and all are final in the last of them.
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
