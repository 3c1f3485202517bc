// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "core/export.h"
#include "partition/schedule.h"
#include "ring/key_tables.h"
#include "transport/transport.h"

namespace ringattn {

/// What one rank attends, sends and receives at each step: the same in all calls over a partition
/// under one mask.
struct RingPlan {
  std::vector<Visit> visits;  // [W]
  std::vector<HopPlan> hops;  // [W - 1]; hops[i] belongs to step i + 1
  int64_t max_rows = 0;       // of the blocks of all ranks
  std::shared_ptr<KeyTables> key_tables;
};
RINGATTN_API RingPlan plan_ring(const Partition& partition, int64_t rank, const Mask& mask);

/// One ring call as one rank runs it.
struct RingCall {
  const RingPlan& plan;
  Scoring scoring;
  int64_t depth = 1;   // blocks in flight ahead of the one being attended, 1 .. W-1
  int64_t number = 0;  // of the call in its group
};

/// Exact attention of this rank's queries over the whole sequence.
///
/// q [B, S_r, H, D], k, v [B, S_r, H_kv, D]: this rank's rows in position order. `transport` may be
/// null for a single rank. Returns out like q, contiguous, and lse [B, H, S_r]. Partial results
/// stay in the state's dtype from the first block to the last; every row is rounded once, in
/// the last launch that has it.
RINGATTN_API std::pair<at::Tensor, at::Tensor> ring_forward(const at::Tensor& q,
                                                            const at::Tensor& k,
                                                            const at::Tensor& v,
                                                            const RingCall& call,
                                                            Transport* transport);

}  // namespace ringattn
