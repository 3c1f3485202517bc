// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch_rules.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/operator_backward.h"
#include "transport/group/group_context.h"

// What PyTorch's transformations do to the operators. A table has one rule for each operator; the
// kernels below read it.

namespace ringattn {
namespace {

using Stack = torch::jit::Stack;

struct Rule {
  const char* name;
  const char* backward;  // the operator of its gradients; null: there is none
  bool collective;  // has a group_name: a refusal is reported to the peers, which wait in the call
  // Inputs that autocast casts, as those of PyTorch's own attention. States keep their dtype.
  std::array<std::string_view, 3> autocast{};
};

constexpr std::array kRules = {
    Rule{"block_attention", "block_attention_backward", /*collective=*/false, {"q", "k", "v"}},
    Rule{"block_attention_backward", nullptr, /*collective=*/false},
    Rule{"block_attention_", nullptr, /*collective=*/false, {"q", "k", "v"}},
    Rule{"merge_states_", nullptr, /*collective=*/false},
    Rule{"ring_forward", "ring_backward", /*collective=*/true, {"q", "k", "v"}},
    Rule{"ring_backward", nullptr, /*collective=*/true},
    Rule{"rotate_kv", nullptr, /*collective=*/true, {"kv"}},
    Rule{"wait_kv", nullptr, /*collective=*/false},
    Rule{"decode_attention", nullptr, /*collective=*/true, {"q", "k", "v"}},
    Rule{"add_rms_norm", nullptr, /*collective=*/false},
    Rule{"gated_silu", nullptr, /*collective=*/false},
    Rule{"rotate_into_cache", nullptr, /*collective=*/false},
    Rule{"gather", nullptr, /*collective=*/true},
    Rule{"all_gather", nullptr, /*collective=*/true},
};

c10::OperatorHandle find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("ringattn::" + name).c_str(), "");
}

// Where the arguments lie that the rule of an operator is about.
struct Arguments {
  Arguments(const Rule& rule, const c10::FunctionSchema& schema)
      : count(schema.arguments().size()) {
    const auto position = [&](std::string_view name) -> size_t {
      const auto found = schema.argumentIndexWithName(name);
      TORCH_INTERNAL_ASSERT(found.has_value(), rule.name, " has no argument ", name);
      return *found;
    };
    for (size_t i = 0; i < count; ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor())) tensors.push_back(i);
      const c10::AliasInfo* alias = argument.alias_info();
      if (alias != nullptr && alias->isWrite()) written.push_back(i);
    }
    for (const std::string_view name : rule.autocast) {
      if (!name.empty()) autocast.push_back(position(name));
    }
    if (rule.collective) group_name = position("group_name");
    if (rule.backward == nullptr) return;
    sinks = position("sinks");
    backward = find_operator(rule.backward);
  }

  size_t count;
  std::vector<size_t> tensors, written, autocast;
  std::optional<size_t> group_name;  // of a collective operator
  // Of an operator with a backward.
  std::optional<size_t> sinks;
  std::optional<c10::OperatorHandle> backward;
};

// A call: its operator, its stack and where its arguments lie.
struct Call {
  const Arguments& arguments;
  const c10::OperatorHandle& op;
  Stack& stack;

  c10::IValue& argument(size_t i) const { return torch::jit::peek(stack, i, arguments.count); }
  const std::string& name(size_t i) const { return op.schema().arguments()[i].name(); }
  /// Whether it is given: a tensor may be optional.
  bool has_tensor(size_t i) const { return argument(i).isTensor(); }
  const at::Tensor& tensor(size_t i) const { return argument(i).toTensor(); }
};

// Whether tensors are fake, or operators are recorded, also beneath what functorch has wrapped.
bool is_traced(const Call& call) {
  using Mode = c10::impl::TorchDispatchModeKey;
  if (c10::impl::TorchDispatchModeTLS::get_mode(Mode::FAKE).has_value() ||
      c10::impl::TorchDispatchModeTLS::get_mode(Mode::PROXY).has_value()) {
    return true;
  }
  const auto& tensors = call.arguments.tensors;
  return std::any_of(tensors.begin(), tensors.end(), [&](size_t i) {
    return call.has_tensor(i) && call.tensor(i).key_set().has(c10::DispatchKey::Python);
  });
}

// Runs `check` for each tensor. Where it refuses one of a collective call, the refusal is published
// to the peers, which wait for this rank's part in it. Nothing is published while tracing: the real
// call follows, and may succeed.
template <typename Check>
void check_tensors(const Call& call, const Check& check) {
  try {
    for (const size_t i : call.arguments.tensors) {
      if (call.has_tensor(i)) check(i, call.tensor(i));
    }
  } catch (const c10::Error& refusal) {
    if (!call.arguments.group_name || is_traced(call)) throw;
    const std::string& group_name = call.argument(*call.arguments.group_name).toStringRef();
    try {
      const auto group = group_name.empty() ? nullptr : GroupContext::resolve(group_name);
      // Where a thread is in a call, its number is not this one's to refuse.
      const CallEntry entry(group.get(), "a refused call");
      if (group && group->size() > 1) group->refuse_call(refusal.what_without_backtrace());
    } catch (const std::exception&) {
      // no such group, no store any more, or a busy one: this rank's mistake is still its own
    }
    throw;
  }
}

void check_no_tangent(const Call& call, size_t i, const at::Tensor& tensor) {
  RINGATTN_CHECK(!tensor._fw_grad(/*level=*/0).defined(), call.name(i),
                 " must have no tangent because there is no forward-mode derivative, got a dual "
                 "tensor");
}

// Autograd's own functions in C++ have no rule for these transforms.
void check_not_in_torch_func(const Call& call, size_t i, const at::Tensor& tensor) {
  RINGATTN_CHECK(!tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper), call.name(i),
                 " must not be differentiated by torch.func.grad or vjp, got a tensor that they "
                 "track: call backward() or torch.autograd.grad()");
}

// Nothing that the operator itself calls is differentiated.
void run_below_autograd(const Call& call, c10::DispatchKeySet keys) {
  const at::AutoDispatchBelowADInplaceOrView below;
  call.op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, &call.stack);
}

// A result that silently is a constant would train a wrong model. Nor is there a derivative in
// forward mode.
void refuse_gradients(const Call& call, c10::DispatchKeySet keys) {
  const bool with_grad = c10::GradMode::is_enabled();
  check_tensors(call, [&](size_t i, const at::Tensor& tensor) {
    check_no_tangent(call, i, tensor);
    RINGATTN_CHECK(!with_grad || !tensor.requires_grad(), call.name(i),
                   " must not require grad because ", call.op.schema().name(),
                   " has no backward: call it under torch.no_grad(), got requires_grad=True");
  });
  // A graph that saved a written tensor for its backward detects the write by the version.
  std::vector<at::Tensor> written;
  for (const size_t i : call.arguments.written) written.push_back(call.tensor(i));
  run_below_autograd(call, keys);
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

void differentiate(const Call& call, c10::DispatchKeySet keys) {
  const auto& sinks = call.arguments.sinks;
  check_tensors(call, [&](size_t i, const at::Tensor& tensor) {
    check_no_tangent(call, i, tensor);
    check_not_in_torch_func(call, i, tensor);
  });
  constexpr size_t kNumInputs = 3;  // q, k, v
  bool with_grad = call.has_tensor(*sinks) && call.tensor(*sinks).requires_grad();
  for (size_t i = 0; i < kNumInputs; ++i) with_grad = with_grad || call.tensor(i).requires_grad();
  if (!with_grad || !c10::GradMode::is_enabled()) return run_below_autograd(call, keys);
  const auto begin = call.stack.end() - static_cast<int64_t>(call.arguments.count);
  const std::vector<c10::IValue> given(begin, call.stack.end());
  const auto forward = [&] {
    run_below_autograd(call, keys);
    std::vector<at::Tensor> results;
    for (const c10::IValue& result : torch::jit::last(call.stack, 2)) {
      results.push_back(result.toTensor());
    }
    torch::jit::drop(call.stack, 2);
    return results;
  };
  for (at::Tensor& result :
       differentiable_results({*call.arguments.backward, given, *sinks, forward})) {
    call.stack.emplace_back(std::move(result));
  }
}

template <c10::DeviceType device_type>
void autocast(const Call& call, c10::DispatchKeySet) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  for (const size_t i : call.arguments.autocast) {
    call.argument(i) = at::autocast::cached_cast(dtype, call.tensor(i), device_type);
  }
  call.op.callBoxed(&call.stack);
}

void refuse_vmap(const Call& call, c10::DispatchKeySet) {
  check_tensors(call, [&](size_t i, const at::Tensor& tensor) {
    RINGATTN_CHECK(!at::functorch::isBatchedTensor(tensor), call.name(i),
                   " must not be batched by torch.vmap, got a batched tensor (B is the batch)");
  });
  TORCH_INTERNAL_ASSERT(false, call.op.schema().name(), " was called for a batched tensor");
}

// One of these functions for one operator.
class Kernel : public c10::OperatorKernel {
 public:
  using Function = void(const Call& call, c10::DispatchKeySet keys);
  Kernel(Function* function, Arguments arguments)
      : function_(function), arguments_(std::move(arguments)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    function_({arguments_, op, *stack}, keys);
  }

 private:
  Function* const function_;
  const Arguments arguments_;
};

}  // namespace

void register_dispatch_rules(torch::Library& library) {
  for (const Rule& rule : kRules) {
    const c10::OperatorHandle op = find_operator(rule.name);
    const auto add = [&](c10::DispatchKey key, Kernel::Function* function) {
      auto kernel = std::make_unique<Kernel>(function, Arguments(rule, op.schema()));
      library.impl(
          rule.name,
          torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
    };
    add(c10::DispatchKey::Autograd, rule.backward == nullptr ? &refuse_gradients : &differentiate);
    add(c10::DispatchKey::AutocastCPU, &autocast<c10::kCPU>);
    add(c10::DispatchKey::AutocastCUDA, &autocast<c10::kCUDA>);
    add(c10::DispatchKey::FuncTorchBatched, &refuse_vmap);
  }
}

}  // namespace ringattn
