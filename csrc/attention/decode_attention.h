// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "core/export.h"
#include "core/shape.h"

namespace ringattn {

/// Few queries [B, T, H, D] against this rank's cached keys k, v [B, S_k, H_kv, D], all visible.
/// Returns one buffer in state dtype: out [B, T, H, D], then lse [B, H, T], so that ranks exchange
/// it in one message. S_k may be 0.
RINGATTN_API at::Tensor decode_partial(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, double scale);

/// Merges what decode_partial returned on every rank, partials [W, B * T * H * (D + 1)], in rank
/// order. Returns out like q.
RINGATTN_API at::Tensor merge_partials(const at::Tensor& partials, const at::Tensor& q);

}  // namespace ringattn
