// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/attention_call.h"

namespace ringattn::cpu {

/// See ringattn::block_attention_backward. Half types are widened first.
void block_attention_backward(const at::Tensor& q, const KeyBlock& block, const Scoring& scoring,
                              const RowGradients& rows, const at::Tensor& dk, const at::Tensor& dv);

}  // namespace ringattn::cpu
