// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "attention/params.h"

// Division of a list of key segments among launches of a kernel that takes a limited number of
// them. Plain C++.

namespace ringattn::cuda {

/// The launch of p's segments from `first` on, at most `max_segments` of them. The launches of a
/// list run one after the other, and each folds into the state of the one before, which p must
/// have: all but the last launch write all rows to the state, also those that are final in p.
inline BlockAttentionParams launch_of_list(const BlockAttentionParams& p, int first,
                                           int max_segments) {
  BlockAttentionParams launch = p;
  launch.segments = p.segments + first;
  launch.num_segments = std::min(max_segments, p.num_segments - first);
  launch.fold = p.fold || first > 0;
  if (first + launch.num_segments < p.num_segments) {
    launch.out = {};
    launch.final_begin = launch.final_end = 0;
  }
  return launch;
}

}  // namespace ringattn::cuda
