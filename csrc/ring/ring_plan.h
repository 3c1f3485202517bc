// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention_call.h"
#include "core/export.h"
#include "core/hop_plan.h"
#include "partition/schedule.h"
#include "ring/key_tables.h"

namespace ringattn {

/// What one rank attends, sends and receives at each step: the same in all calls over the same
/// partitions under one mask, in both passes.
struct RingPlan {
  std::vector<Visit> visits;  // [W]
  std::vector<HopPlan> hops;  // [W - 1]; hops[i] belongs to step i + 1
  int64_t max_rows = 0;       // of the blocks of all ranks
  std::shared_ptr<KeyTables> key_tables;

  /// Bytes of the largest message of any rank: rows of keys and values, or their gradients, of the
  /// heads that `k` [B, S_r, H_kv, D] has.
  int64_t largest_message(const at::Tensor& k, at::ScalarType dtype) const {
    return 2 * max_rows * k.size(0) * k.size(2) * k.size(3) *
           static_cast<int64_t>(c10::elementSize(dtype));
  }
  /// Messages of a round in a backward.
  int64_t messages_of_round() const {
    return std::min<int64_t>(static_cast<int64_t>(hops.size()), kStepsOfRound);
  }
};
/// `queries` and `keys`: as in schedule().
RINGATTN_API RingPlan plan_ring(const Partition& queries, const Partition& keys, int64_t rank,
                                const Mask& mask);

/// One ring call as one rank runs it.
struct RingCall {
  const RingPlan& plan;
  Scoring scoring;
  int64_t depth = 1;   // blocks in flight ahead of the one being attended, 1 .. W-1
  int64_t number = 0;  // of the call in its group
};

/// The rows `range` of x along `dim`.
inline at::Tensor rows_of(const at::Tensor& x, int64_t dim, const RowRange& range) {
  return range.size() == x.size(dim) ? x : x.narrow(dim, range.begin, range.size());
}

}  // namespace ringattn
