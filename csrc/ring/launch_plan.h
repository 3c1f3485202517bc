// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "transport/transport.h"

namespace ringattn {

/// How a ring call divides the blocks of its schedule among launches of the attention kernel.
enum class LaunchPlan {
  kPerBlock,     // one launch for each block, after its arrival
  kOwnThenRest,  // one for the own block, one for all others, after the arrival of all
  kSingle,       // one for all blocks, which fetches them by itself
};

/// The plan for blocks of which `resident` holds all; null: they arrive one by one.
inline LaunchPlan launch_plan(const ResidentBlocks* resident) {
  if (resident == nullptr) return LaunchPlan::kPerBlock;
  return resident->sources.empty() ? LaunchPlan::kOwnThenRest : LaunchPlan::kSingle;
}

/// The end of the launch that begins with step `first`, of `num_steps` steps.
inline int64_t launch_end(LaunchPlan plan, int64_t first, int64_t num_steps) {
  const bool takes_rest =
      plan == LaunchPlan::kSingle || (plan == LaunchPlan::kOwnThenRest && first > 0);
  return takes_rest ? num_steps : first + 1;
}

}  // namespace ringattn
