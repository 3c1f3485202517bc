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

/// Of 8 ranks and a million tokens; with sanitizers, which slow everything down, much less is
/// asked.
#ifdef __SANITIZE_ADDRESS__
constexpr double kMostPlanningMs = 50.0;
#else
constexpr double kMostPlanningMs = 5.0;
#endif

inline double slowest(const std::vector<double>& ms) {
  return *std::max_element(ms.begin(), ms.end());
}

}  // namespace ringattn::testing
