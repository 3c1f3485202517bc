// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/attention_call.h"
#include "core/export.h"

// The backward of block attention on tensors of any device that has kernels. Arguments have been
// checked by the caller.

namespace ringattn {

/// What a backward needs of these rows, dq being 0. `grad_lse` may be undefined: 0.
RINGATTN_API RowGradients row_gradients(const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                        const at::Tensor& out, const at::Tensor& lse);

/// The gradient of sinks [H], in the state's dtype, of these rows alone.
RINGATTN_API at::Tensor sink_gradients(const at::Tensor& sinks, const at::Tensor& lse,
                                       const at::Tensor& delta);

/// int32 [S_q, 2] -> int32 [num_keys, 2], on the same device: of rows that see keys [begin, end),
/// the rows that see each key. Neither column decreases, before and after.
RINGATTN_API at::Tensor transposed_ranges(const at::Tensor& key_ranges, int64_t num_keys);

/// Adds the gradient of the rows to rows.dq, and writes those of the block's keys and values to dk
/// and dv [B, S_k, H_kv, D], both in the state's dtype or both rounded to the block's. Strides are
/// any but a last one of 1. A block with a table has query_ranges. On CUDA: runs on the current
/// stream. Under torch.use_deterministic_algorithms(True) the same inputs give the same bits.
///   scheduling   kDynamic where other kernels may hold multiprocessors meanwhile
///   leaves_room  one multiprocessor is left to short kernels of other streams
RINGATTN_API void block_attention_backward(const at::Tensor& q, const KeyBlock& block,
                                           const Scoring& scoring, const RowGradients& rows,
                                           const at::Tensor& dk, const at::Tensor& dv,
                                           Scheduling scheduling = Scheduling::kStatic,
                                           bool leaves_room = false);

}  // namespace ringattn
