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

/// The state of all rows of q over the keys of one block, in tensors of its own. Half types are
/// widened first: nothing is rounded before the result is.
State attend(const at::Tensor& q, const KeyBlock& block, const Scoring& scoring);

/// Sinks join the denominator of a state's rows, in place.
void add_sinks(const State& state, const Scoring& scoring);

/// See ringattn::block_attention; any number of blocks. Half types are widened first: nothing is
/// rounded before the result is.
void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks,
                     const Scoring& scoring, const AttentionResult& result);

}  // namespace ringattn::cpu
