// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "attention/block_attention_backward.h"
#include "core/export.h"
#include "ring/ring_plan.h"
#include "transport/p2p_transport.h"

namespace ringattn {

/// Gradients of this rank's rows, in the dtype of q, contiguous.
struct RingGradients {
  at::Tensor dq;  // [B, S_r, H, D]
  at::Tensor dk;  // [B, S_r, H_kv, D]
  at::Tensor dv;
};

/// The backward of ring_forward: of q, k, v as it had them, and of `make_rows()`, made from its
/// results while the first block travels. Every rank computes the gradients of all keys that its
/// queries see, and those of other ranks' keys return to their owner in the state's dtype. They are
/// added to those of the owner's rows in the order of the steps, and rounded once. All visiting
/// blocks are held at the same time. `transport` may be null for a single rank.
RINGATTN_API RingGradients ring_backward(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v,
                                         c10::function_ref<RowGradients()> make_rows,
                                         const RingCall& call, MessageTransport* transport);

}  // namespace ringattn
