// SPDX-License-Identifier: Apache-2.0
#include "attention/decode_attention.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <utility>

#include "ops/checks.h"
#include "transport/group/group_context.h"

namespace ringattn {
namespace {

// Without the number of keys: it may differ between ranks.
Signature signature(const at::Tensor& q, const at::Tensor& k, double scale,
                    const DecodeMask& mask) {
  return Signature("decode_attention")
      .add("shape of q", q.sizes())
      .add("key heads", k.size(2))
      .add("dtype", dtype_name(q.scalar_type()))
      .add("device type", c10::DeviceTypeName(q.device().type()))
      .add("scale", scale)
      .add("softcap", mask.softcap)
      .add("sinks", mask.sinks.has_value())
      .add("key_begins", mask.key_begins.has_value());
}

void check_bounds(const at::Tensor& bounds, const char* name, const at::Tensor& q) {
  RINGATTN_CHECK(bounds.scalar_type() == at::kInt, name, " must be torch.int32, got ",
                 dtype_name(bounds.scalar_type()));
  RINGATTN_CHECK(bounds.dim() == 1 && bounds.size(0) == q.size(0), name,
                 " must have shape [B], B = ", q.size(0), ", got ", bounds.sizes());
  RINGATTN_CHECK(bounds.device() == q.device(), name, " must be on the device of q, ", q.device(),
                 ", got ", bounds.device());
}

void check_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                  const DecodeMask& mask) {
  check_attention(q, k, v, scale);
  if (mask.key_lengths) check_bounds(*mask.key_lengths, "key_lengths", q);
  if (mask.key_begins) check_bounds(*mask.key_begins, "key_begins", q);
  check_scoring(q, mask.softcap, mask.sinks);
}

using OutAndLse = std::tuple<at::Tensor, at::Tensor>;

// The transport whose kernels exchange the partials by themselves; null: a collective carries them.
// The same on every rank.
MessageTransport* exchanging_transport(GroupContext& group, const at::Tensor& q) {
  if (!q.is_cuda()) return nullptr;
  MessageTransport& transport = group.transport("auto", q.device());
  return transport.exchanges_partials(partial_bytes(q)) ? &transport : nullptr;
}

OutAndLse decode_attention_op(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              double scale, c10::string_view group_name,
                              const std::optional<at::Tensor>& key_lengths,
                              const std::optional<at::Tensor>& key_begins, double softcap,
                              const std::optional<at::Tensor>& sinks, bool wide) {
  const at::ScalarType dtype = wide ? state_dtype(q.scalar_type()) : q.scalar_type();
  DecodeMask mask = {key_lengths, key_begins, softcap, sinks};
  const c10::DeviceGuard guard(q.device());
  const auto group = group_name.empty() ? nullptr : GroupContext::resolve(std::string(group_name));
  const CallEntry entry(group.get(), "decode_attention");
  if (!group || group->size() == 1) {
    check_decode(q, k, v, scale, mask);
    return decode_alone(q, k, v, scale, mask, dtype);
  }
  Signature asked = check_call(*group, [&] {
    check_decode(q, k, v, scale, mask);
    group->check_device(q.device());
    Signature made = signature(q, k, scale, mask);
    check_capture(*group, made, q.device(), [&]() -> const MessageTransport& {
      const MessageTransport* exchanging = exchanging_transport(*group, q);
      return exchanging != nullptr ? *exchanging : group->collectives(q.device());
    });
    return made;
  });
  if (group->rank() != 0) mask.sinks.reset();  // one rank adds them
  const int64_t call =
      group->begin_call(std::make_shared<const Signature>(std::move(asked)), /*tagged=*/q.is_cpu());
  return group->run(call, [&]() -> OutAndLse {
    if (MessageTransport* exchanging = exchanging_transport(*group, q)) {
      const at::Tensor partial = decode_partial(q, k, v, scale, mask);
      OutAndLse merged;
      exchanging->exchange_partials(call, [&](const PartialExchange& exchange) {
        merged = exchange_partials(partial, q, dtype, exchange);
      });
      return merged;
    }
    CollectiveTransport& transport = group->collectives(q.device());
    const at::Tensor partial = decode_partial(q, k, v, scale, mask);
    auto [out, lse] = merge_partials(transport.all_gather(partial, call), q, dtype);
    transport.guard({out, lse});
    return {out, lse};
  });
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("decode_attention", &decode_attention_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("decode_attention", &decode_attention_op); }
#endif

}  // namespace
}  // namespace ringattn
