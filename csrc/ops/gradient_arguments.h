// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "attention/block_attention_backward.h"

// Arguments that the backward operators have in common.

namespace ringattn {

struct GradientArguments {
  const at::Tensor& grad_out;                 // like out
  const std::optional<at::Tensor>& grad_lse;  // like lse; none: 0
  const at::Tensor &out, &lse;                // the results of the forward
};

/// They fit q.
void check_gradients(const GradientArguments& given, const at::Tensor& q);

/// Arguments that have been checked.
RowGradients row_gradients(const GradientArguments& given);

/// [H] in the sinks' dtype, of these rows alone; empty without sinks.
at::Tensor gradient_of_sinks(const std::optional<at::Tensor>& sinks, const RowGradients& rows);

}  // namespace ringattn
