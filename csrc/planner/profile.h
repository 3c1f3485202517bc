// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/attention_tile.h"
#include "partition/mask.h"

// Speeds and limits of unequal ranks, the cost of a layer, and what a call computes of it.

namespace ringattn {

struct RankProfile {
  double attention_tflops = 0.0;          // 1e12 operations a second
  double linear_tflops = 0.0;             // the same, for matrix products
  std::optional<int64_t> max_tokens;      // absent: any number
  double overhead_ms = 0.0;               // once, for a rank that has tokens
  std::optional<double> memory_gbps;      // 1e9 bytes a second, of its memory
  std::optional<double> link_gbps;        // of its links to other ranks; absent: no limit
  std::optional<double> link_latency_us;  // of one message; absent: 0
  // The tiles of its attention kernels; a call uses the kind that ends first. None: rows and keys
  // are not padded. `attention_tflops` is measured in full tiles of the first kind.
  std::vector<AttentionTile> tiles = {};
};

/// One layer.
struct ModelCost {
  double attention_flops = 0.0;  // for every pair of a query and a visible key
  double linear_flops = 0.0;     // for every token
  int64_t kv_bytes = 0;          // key and value of one token
};

/// Bytes of gradients, which are float32, over those of keys and values in 16 bits.
inline constexpr int64_t kGradientBytes = 2;

/// What a call computes. Training: forward and backward, 3.5 times the attention of a forward pass
/// and 3 times its products.
struct Workload {
  Mask mask;
  bool training = false;
};

}  // namespace ringattn
