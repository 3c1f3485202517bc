// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace ringattn {

/// An operator with a backward, and a call of it.
struct DifferentiableCall {
  /// The operator of (grad_out, grad_lse, q, k, v, out, lse, the arguments behind q, k, v) that
  /// returns the gradients of q, k, v and, last, of the sinks.
  const c10::OperatorHandle& backward;
  const std::vector<c10::IValue>& arguments;             // q, k, v first
  size_t sinks;                                          // their place among the arguments
  c10::function_ref<std::vector<at::Tensor>()> forward;  // returns (out, lse)
};

/// The results of a call of which some input requires grad. They can be differentiated once.
std::vector<at::Tensor> differentiable_results(const DifferentiableCall& call);

}  // namespace ringattn
