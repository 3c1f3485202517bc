// SPDX-License-Identifier: Apache-2.0
#include "ops/operator_backward.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>

#include "core/refusal.h"

namespace ringattn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNumInputs = 3;  // q, k, v; the sinks lie elsewhere

/// Returns gradients as they are; their own backward throws: attention has no second derivative.
struct FirstDerivative : torch::autograd::Function<FirstDerivative> {
  static variable_list forward(AutogradContext* ctx, const variable_list& gradients,
                               const at::TensorList& inputs) {
    variable_list results;
    for (const at::Tensor& gradient : gradients) results.push_back(gradient.detach());
    return results;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    TORCH_CHECK(false,
                "ringattn: gradients of attention must not be differentiated again because there "
                "is no double backward, got a second derivative");
  }
};

/// Calls the operator. Its refusal becomes a ValueError without the prefix here, as
/// _distributed/errors.py makes of it for calls from Python: autograd calls this directly.
void call_backward(const std::string& name, torch::jit::Stack& stack) {
  try {
    c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").callBoxed(&stack);
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const c10::Error& error) {
    const char* const message = error.what_without_backtrace();
    if (!is_refusal(message)) throw;
    throw c10::ValueError({__func__, __FILE__, __LINE__}, sentence_of(message));
  }
}

struct OperatorGradient : torch::autograd::Function<OperatorGradient> {
  static variable_list forward(AutogradContext* ctx, const DifferentiableCall& call,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& sinks) {
    variable_list results;
    {
      const at::AutoGradMode as_given(true);  // ranks agree on what requires grad
      results = call.forward();
    }
    ctx->set_materialize_grads(false);
    variable_list saved = results;
    std::vector<c10::IValue> others = call.arguments;
    std::vector<int64_t> places;  // of tensors
    for (size_t i = 0; i < others.size(); ++i) {
      if (!others[i].isTensor()) continue;
      places.push_back(static_cast<int64_t>(i));
      saved.push_back(others[i].toTensor());
      others[i] = {};
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["name"] = call.backward.operator_name().name;
    ctx->saved_data["others"] = c10::ivalue::Tuple::create(std::move(others));
    ctx->saved_data["places"] = std::move(places);
    ctx->saved_data["sinks"] = static_cast<int64_t>(call.sinks);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &out = saved[0], &lse = saved[1];
    std::vector<c10::IValue> arguments = ctx->saved_data["others"].toTuple()->elements().vec();
    auto next = saved.begin() + 2;
    for (const int64_t place : ctx->saved_data["places"].toIntVector()) arguments[place] = *next++;
    torch::jit::Stack stack;
    stack.emplace_back(gradients[0].defined() ? gradients[0] : at::zeros_like(out));
    stack.push_back(gradients[1].defined() ? c10::IValue(gradients[1]) : c10::IValue());
    stack.insert(stack.end(), arguments.begin(), arguments.begin() + kNumInputs);
    stack.insert(stack.end(), {out, lse});
    stack.insert(stack.end(), arguments.begin() + kNumInputs, arguments.end());
    const bool again = c10::GradMode::is_enabled();
    {
      const at::AutoGradMode no_grad(false);
      call_backward(ctx->saved_data["name"].toStringRef(), stack);
    }
    variable_list computed;
    for (const c10::IValue& gradient : stack) computed.push_back(gradient.toTensor());
    if (again) {
      variable_list inputs(saved.begin(), saved.end());
      for (const at::Tensor& gradient : gradients) {
        if (gradient.defined()) inputs.push_back(gradient);
      }
      computed = FirstDerivative::apply(computed, at::TensorList(inputs));
    }
    const bool has_sinks = arguments[ctx->saved_data["sinks"].toInt()].isTensor();
    for (size_t i = 0; i < computed.size(); ++i) {
      const bool is_input = static_cast<int64_t>(i) < kNumInputs || has_sinks;
      if (!is_input || !ctx->needs_input_grad(i)) computed[i] = at::Tensor();
    }
    computed.insert(computed.begin(), at::Tensor());  // of the call itself
    return computed;
  }
};

}  // namespace

std::vector<at::Tensor> differentiable_results(const DifferentiableCall& call) {
  const auto& arguments = call.arguments;
  const c10::IValue& sinks = arguments[call.sinks];
  return OperatorGradient::apply(call, arguments[0].toTensor(), arguments[1].toTensor(),
                                 arguments[2].toTensor(), sinks.toOptional<at::Tensor>());
}

}  // namespace ringattn
