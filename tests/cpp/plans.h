// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "partition/planner.h"

// What tests of plans share.

namespace ringattn::testing {

using Lengths = std::vector<int64_t>;

inline const ModelCost kAttention{16384.0, 0.0, 4096};  // of LLaMA-3-8B

inline double slowest(const std::vector<double>& ms) {
  return *std::max_element(ms.begin(), ms.end());
}

}  // namespace ringattn::testing
