// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "attention/params.h"

// Calls of which only the geometry counts: nothing has memory.

namespace ringattn::testing {

constexpr int kL2Bytes = 50 << 20;
constexpr int kNoMask = 1 << 20;

inline KeySegment segment(int num_keys, int diagonal, int first_query) {
  KeySegment keys;
  keys.num_keys = num_keys;
  keys.diagonal = std::min(diagonal, num_keys);
  keys.first_query = first_query;
  return keys;
}

inline BlockAttentionParams call(const std::vector<KeySegment>& segments, int num_queries,
                                 int num_heads, int num_kv_heads) {
  BlockAttentionParams p;
  p.segments = segments.data();
  p.num_segments = static_cast<int32_t>(segments.size());
  p.batch = 2;
  p.num_queries = num_queries;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = 128;
  return p;
}

}  // namespace ringattn::testing
