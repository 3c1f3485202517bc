// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "ops/checks.h"
#include "transport/group/group_context.h"

// What PyTorch's transformations do to the operators, for all of them at once.

namespace ringattn {
namespace {

using Stack = torch::jit::Stack;

template <typename Visit>
void for_each_argument(const c10::OperatorHandle& op, Stack& stack, const Visit& visit) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    visit(arguments[i], stack[stack.size() - arguments.size() + i]);
  }
}

template <typename Visit>
void for_each_tensor(const c10::OperatorHandle& op, Stack& stack, const Visit& visit) {
  for_each_argument(op, stack, [&](const c10::Argument& argument, c10::IValue& value) {
    if (value.isTensor()) visit(argument.name(), value);
  });
}

// Whether tensors are fake, or operators are recorded, also beneath what functorch has wrapped.
bool is_traced() {
  using Mode = c10::impl::TorchDispatchModeKey;
  return c10::impl::TorchDispatchModeTLS::get_mode(Mode::FAKE).has_value() ||
         c10::impl::TorchDispatchModeTLS::get_mode(Mode::PROXY).has_value();
}

// Runs `body`. Where it refuses an argument of a collective call, the others are told: they wait
// for this rank's part in it. Not of a trace, after which the call may be made once more.
template <typename Body>
void telling_peers(const c10::OperatorHandle& op, Stack& stack, const Body& body) {
  try {
    body();
  } catch (const c10::Error& refusal) {
    bool traced = is_traced();
    for_each_tensor(op, stack, [&](const std::string&, const c10::IValue& value) {
      traced = traced || value.toTensor().key_set().has(c10::DispatchKey::Python);
    });
    for_each_argument(op, stack, [&](const c10::Argument& argument, const c10::IValue& value) {
      if (traced || argument.name() != "group_name" || value.toStringRef().empty()) return;
      try {
        const auto group = GroupContext::resolve(value.toStringRef());
        if (group->size() > 1) group->refuse_call(refusal.what_without_backtrace());
      } catch (const std::exception&) {
        // no such group, or no store any more: this rank's mistake is still its own
      }
    });
    throw;
  }
}

// There is no backward: a result that silently is a constant would train a wrong model. Nor is
// there a derivative in forward mode.
void check_without_gradients(const c10::OperatorHandle& op, Stack* stack) {
  for_each_tensor(op, *stack, [&](const std::string& name, const c10::IValue& value) {
    RINGATTN_CHECK(
        !value.toTensor()._fw_grad(/*level=*/0).defined(), name,
        " must have no tangent because there is no forward-mode derivative, got a dual tensor");
  });
  if (c10::GradMode::is_enabled()) {
    for_each_tensor(op, *stack, [&](const std::string& name, const c10::IValue& value) {
      RINGATTN_CHECK(!value.toTensor().requires_grad(), name,
                     " must not require grad because there is no backward yet (detach it, or call ",
                     "under torch.no_grad()), got requires_grad=True");
    });
  }
}

// Nothing that the operator itself calls is differentiated.
void without_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  telling_peers(op, *stack, [&] { check_without_gradients(op, stack); });
  // A graph that saved a written tensor for its backward detects the write by the version.
  std::vector<at::Tensor> written;
  for_each_argument(op, *stack, [&](const c10::Argument& argument, const c10::IValue& value) {
    const c10::AliasInfo* alias = argument.alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back(value.toTensor());
  });
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

// q, k, v and kv follow autocast as in PyTorch's own attention; states keep their dtype.
template <c10::DeviceType device_type>
void autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device_type));
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  constexpr std::array<const char*, 4> kInputs = {"q", "k", "v", "kv"};
  for_each_tensor(op, *stack, [&](const std::string& name, c10::IValue& value) {
    if (std::find(kInputs.begin(), kInputs.end(), name) == kInputs.end()) return;
    value = at::autocast::cached_cast(dtype, value.toTensor(), device_type);
  });
  op.callBoxed(stack);
}

void refuse_vmap(const c10::OperatorHandle& op, Stack* stack) {
  telling_peers(op, *stack, [&] {
    for_each_tensor(op, *stack, [&](const std::string& name, const c10::IValue& value) {
      RINGATTN_CHECK(!at::functorch::isBatchedTensor(value.toTensor()), name,
                     " must not be batched by torch.vmap, got a batched tensor (B is the batch)");
    });
    TORCH_INTERNAL_ASSERT(false, op.schema().name(), " was called for a batched tensor");
  });
}

constexpr std::array<const char*, 8> kOperators = {
    "block_attention", "block_attention_", "merge_states_",    "ring_forward",
    "rotate_kv",       "wait_kv",          "decode_attention", "gather"};

TORCH_LIBRARY_IMPL(ringattn, Autograd, m) {
  for (const char* op : kOperators) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&without_gradients>());
  }
}

TORCH_LIBRARY_IMPL(ringattn, AutocastCPU, m) {
  for (const char* op : kOperators) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast<c10::kCPU>>());
  }
}

TORCH_LIBRARY_IMPL(ringattn, AutocastCUDA, m) {
  for (const char* op : kOperators) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast<c10::kCUDA>>());
  }
}

TORCH_LIBRARY_IMPL(ringattn, FuncTorchBatched, m) {
  for (const char* op : kOperators) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
  }
}

}  // namespace
}  // namespace ringattn
