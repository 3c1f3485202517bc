// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

// In place of csrc/peer_sync/dependent_launch.cuh where a test emulates device code.

namespace ringattn::cuda {

/// Called by every thread that triggers the next kernel. A thread block counts with its first.
inline std::function<void()> on_trigger_next;

inline void wait_for_previous_kernel() {}
inline void trigger_next_kernel() {
  if (on_trigger_next) on_trigger_next();
}

}  // namespace ringattn::cuda
