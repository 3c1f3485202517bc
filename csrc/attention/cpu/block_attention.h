// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/attention_call.h"

namespace ringattn::cpu {

struct State {
  at::Tensor out;  // [B, S_q, H, D], state dtype
  at::Tensor lse;  // [B, H, S_q]
};

/// The state of the band's rows over its keys alone, in tensors of its own. Half types are widened
/// first: nothing is rounded before the result is.
State attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
             const Band& band);

/// See ringattn::block_attention; any number of blocks, any bands. Half types are widened first:
/// nothing is rounded before the result is.
void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks, double scale,
                     const AttentionResult& result);

}  // namespace ringattn::cpu
