// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/attention_tile.h"

// What unequal ranks can do, and what is asked of them.

namespace ringattn {

struct RankProfile {
  double attention_tflops = 0.0;          // 1e12 operations a second
  double linear_tflops = 0.0;             // the same, of matrix products
  std::optional<int64_t> max_tokens;      // absent: any number
  double overhead_ms = 0.0;               // once, for a rank that has tokens
  std::optional<double> memory_gbps;      // 1e9 bytes a second, of its memory
  std::optional<double> link_gbps;        // of its links to other ranks; absent: bytes take no time
  std::optional<double> link_latency_us;  // of one message; absent: 0
  // That its attention computes, all of one kind in a call: that which is done first. None: it
  // computes what is there. `attention_tflops` is in whole ones of the first kind.
  std::vector<AttentionTile> tiles = {};
};

/// One layer.
struct ModelCost {
  double attention_flops = 0.0;  // for every pair of a query and a key that it sees
  double linear_flops = 0.0;     // for every token
  int64_t kv_bytes = 0;          // key and value of one token
};

/// Operations in a millisecond of one TFLOP/s.
inline constexpr double kFlopsPerMs = 1e9;

}  // namespace ringattn
