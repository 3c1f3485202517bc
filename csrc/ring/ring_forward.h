// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "core/export.h"
#include "ring/ring_plan.h"
#include "transport/transport.h"

namespace ringattn {

/// Exact attention of this rank's queries over the whole sequence.
///
/// q [B, S_r, H, D], k, v [B, N_r, H_kv, D]: this rank's rows in position order. `transport` may be
/// null for a single rank. Returns out like q, contiguous, and lse [B, H, S_r]. Partial results
/// stay in the state's dtype from the first block to the last; every row is rounded once, in
/// the last launch that has it.
RINGATTN_API std::pair<at::Tensor, at::Tensor> ring_forward(const at::Tensor& q,
                                                            const at::Tensor& k,
                                                            const at::Tensor& v,
                                                            const RingCall& call,
                                                            Transport* transport);

}  // namespace ringattn
