// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ringattn {

/// Rows [begin, end) of a block.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  /// Extends this range until it has the rows of `other` too.
  void include(const RowRange& other) {
    if (other.empty()) return;
    *this = empty() ? other : RowRange{std::min(begin, other.begin), std::max(end, other.end)};
  }
  friend bool operator==(const RowRange& a, const RowRange& b) {
    return a.begin == b.begin && a.end == b.end;
  }
};

/// Rows of a block that a rank sees: those of the hull that are in no gap.
struct RowSet {
  RowRange hull;
  std::vector<RowRange> gaps;  // ascending and apart, inside of the hull

  int64_t size() const {
    int64_t rows = hull.size();
    for (const RowRange& gap : gaps) rows -= gap.size();
    return rows;
  }
  bool empty() const { return hull.empty(); }
  /// The stretches between the gaps, ascending; one, which may be empty, where there is no gap.
  std::vector<RowRange> ranges() const {
    std::vector<RowRange> ranges;
    int64_t begin = hull.begin;
    for (const RowRange& gap : gaps) {
      ranges.push_back({begin, gap.begin});
      begin = gap.end;
    }
    ranges.push_back({begin, hull.end});
    return ranges;
  }
  friend bool operator==(const RowSet& a, const RowSet& b) {
    return a.hull == b.hull && a.gaps == b.gaps;
  }
};

/// Rows that travel on either side of a gap between rows that are seen. A kernel may multiply the
/// values of so many rows beside those that a query sees by a weight of 0, and 0 times NaN is NaN.
constexpr int64_t kRowsAtGaps = 512;
/// The rows of shorter gaps travel.
constexpr int64_t kMinGap = 128;

/// Steps of a backward whose gradients may be on their way at the same time, each in memory of its
/// own. After so many, ranks wait for them.
constexpr int64_t kStepsOfRound = 8;

/// What this rank sends and receives at one step, 1 .. W-1. (At step 0 it attends its own block.)
struct HopPlan {
  int64_t destination = 0;  // the rank that this rank's block goes to
  int64_t source = 0;       // the rank whose block comes here
  RowSet sent;              // of this rank's block, what the destination sees; empty: nothing
  RowSet received;          // of the source's block, one row behind the other
  int64_t source_rows = 0;  // rows of the source's whole block
};

/// From the first row that this rank's hops send to the last.
inline RowRange rows_sent(const std::vector<HopPlan>& hops) {
  RowRange rows;
  for (const HopPlan& hop : hops) rows.include(hop.sent.hull);
  return rows;
}

/// Rows of each buffer that the hops use in rotation for what they receive, or send. Up to `depth`
/// blocks are ahead of the one in use: depth + 1 buffers, or one for each of fewer hops.
inline std::vector<int64_t> buffer_rows(const std::vector<HopPlan>& hops, int64_t depth,
                                        RowSet HopPlan::*which = &HopPlan::received) {
  std::vector<int64_t> rows(std::min<int64_t>(hops.size(), depth + 1), 0);
  for (size_t i = 0; i < hops.size(); ++i) {
    int64_t& buffer = rows[i % rows.size()];
    buffer = std::max(buffer, (hops[i].*which).size());
  }
  return rows;
}

}  // namespace ringattn
