// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "core/export.h"
#include "core/shape.h"

namespace ringattn {

/// Folds the state (other_out, other_lse) into (out, lse), in place: core/lse_merge.h's algebra,
/// row by row. out, other_out [B, S_q, H, D] and lse, other_lse [B, H, S_q]; float32 or float64,
/// all the same; any strides.
RINGATTN_API void merge_states_(const at::Tensor& out, const at::Tensor& lse,
                                const at::Tensor& other_out, const at::Tensor& other_lse);

/// Folds states that lie one behind the other, outs [N, B, S_q, H, D] and lses [N, B, H, S_q] in
/// float32 (float64), in the order 0 .. N-1. Returns out [B, S_q, H, D], rounded once to `dtype`,
/// and lse [B, H, S_q], not rounded.
RINGATTN_API std::pair<at::Tensor, at::Tensor> merge_all_states(const at::Tensor& outs,
                                                                const at::Tensor& lses,
                                                                at::ScalarType dtype);

}  // namespace ringattn
