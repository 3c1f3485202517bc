// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

// In place of csrc/peer_sync/dependent_launch.cuh where a test runs device code on lanes.h.

namespace ringattn::cuda {

/// Called by every thread that lets the next kernel begin. A thread block counts with its first.
inline std::function<void()> on_let_next_begin;

inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {
  if (on_let_next_begin) on_let_next_begin();
}

}  // namespace ringattn::cuda
