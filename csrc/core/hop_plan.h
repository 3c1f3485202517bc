// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ringattn {

/// What this rank sends and receives at one step, 1 .. W-1. (At step 0 it attends its own block.)
struct HopPlan {
  int64_t destination = 0;  // the rank that this rank's block goes to
  int64_t source = 0;       // the rank whose block comes here
  int64_t rows_sent = 0;  // leading rows of this rank's block that the destination's schedule uses;
                          // 0: nothing is sent
  int64_t rows_received = 0;
  int64_t source_rows = 0;  // rows of the whole block
};

/// Rows of each buffer that blocks arrive in. Up to `depth` blocks are ahead of the one being
/// attended: depth + 1 buffers in rotation, or one for each of fewer hops.
inline std::vector<int64_t> buffer_rows(const std::vector<HopPlan>& hops, int64_t depth) {
  std::vector<int64_t> rows(std::min<int64_t>(hops.size(), depth + 1), 0);
  for (size_t i = 0; i < hops.size(); ++i) {
    int64_t& buffer = rows[i % rows.size()];
    buffer = std::max(buffer, hops[i].rows_received);
  }
  return rows;
}

}  // namespace ringattn
