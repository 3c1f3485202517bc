// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partition/visible_pairs.h"

namespace ringattn {

/// Rows that no rank owns yet, in a circle.
///
/// All arcs of T of the circle's N rows have T / N of its pairs on average, and the pairs of arcs
/// that begin at adjacent rows differ by at most one row's. So an arc has T / N of the pairs within
/// half a row. Without it the rest closes to a smaller circle, of which the same is true: 2 (W - 1)
/// cuts at most balance W ranks in tokens and in pairs. This is necklace splitting with two kinds
/// of beads (https://doi.org/10.1016/0001-8708(87)90055-7).
class Circle {
 public:
  /// The rows of `runs`, in their order; both arguments must outlive the circle.
  Circle(const VisiblePairs& pairs, const std::vector<RowRun>& runs);

  int64_t num_rows() const { return rows_before_.back(); }
  int64_t num_pairs() const { return pairs_before_.back(); }

  struct Goal {
    int64_t rows = 0;    // in [1, num_rows()]
    double pairs = 0.0;  // the goal
    double least = 0.0;  // what is allowed
    double most = 0.0;
  };
  /// Takes an arc out of the circle: the one with the fewest rows that are fetched by its rank or
  /// from it, among those with an allowed number of pairs; without any, that nearest to the goal.
  std::vector<Segment> take_arc(const Goal& goal);

 private:
  // Rows [begin, end) of one run.
  struct Slice {
    const RowRun* run = nullptr;
    int64_t begin = 0;
    int64_t end = 0;
    Segment keys;  // that the rows see
  };
  // A row of the circle.
  struct Place {
    size_t slice = 0;
    int64_t row = 0;
  };
  // The rows from `first` up to `past`, the first row behind the arc.
  struct Arc {
    int64_t start = 0;
    Place first;
    Place past;
  };

  Slice slice(const RowRun& run, int64_t begin, int64_t end) const;
  size_t next(size_t slice) const { return slice + 1 == slices_.size() ? 0 : slice + 1; }
  size_t previous(size_t slice) const { return (slice == 0 ? slices_.size() : slice) - 1; }
  Place after(Place place, int64_t rows) const;
  Place row_before(Place place) const;
  int64_t pairs_until(Place place) const;
  int64_t num_pairs(const Arc& arc) const;
  int64_t rows_to_fetch(const Arc& arc) const;
  int64_t fetched_after(size_t slice, Segment keys, int64_t rows) const;
  template <typename Consider>
  void for_each_turn(int64_t rows, const Consider& consider) const;
  int64_t best_start(const Goal& goal) const;
  void sum_up();

  const VisiblePairs& pairs_;
  std::vector<Slice> slices_;
  // Of the slices before each, and of all. Rows to fetch do not count what the slice before sees.
  std::vector<int64_t> rows_before_, pairs_before_, fetched_before_;
};

}  // namespace ringattn
