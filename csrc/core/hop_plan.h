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

/// What this rank sends and receives at one step, 1 .. W-1. (At step 0 it attends its own block.)
struct HopPlan {
  int64_t destination = 0;  // the rank that this rank's block goes to
  int64_t source = 0;       // the rank whose block comes here
  RowRange sent;            // of this rank's block, what the destination sees; empty: nothing
  RowRange received;        // of the source's block
  int64_t source_rows = 0;  // rows of the source's whole block
};

/// The rows that this rank's hops send.
inline RowRange rows_sent(const std::vector<HopPlan>& hops) {
  RowRange rows;
  for (const HopPlan& hop : hops) rows.include(hop.sent);
  return rows;
}

/// Rows of each buffer that the hops use in rotation for what they receive, or send. Up to `depth`
/// blocks are ahead of the one in use: depth + 1 buffers, or one for each of fewer hops.
inline std::vector<int64_t> buffer_rows(const std::vector<HopPlan>& hops, int64_t depth,
                                        RowRange HopPlan::*which = &HopPlan::received) {
  std::vector<int64_t> rows(std::min<int64_t>(hops.size(), depth + 1), 0);
  for (size_t i = 0; i < hops.size(); ++i) {
    int64_t& buffer = rows[i % rows.size()];
    buffer = std::max(buffer, (hops[i].*which).size());
  }
  return rows;
}

}  // namespace ringattn
