// SPDX-License-Identifier: Apache-2.0
#include "attention/decode_attention.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "transport/ring_group.h"

namespace ringattn {
namespace {

// Not the number of keys: every rank holds as many as it likes.
Signature signature(const at::Tensor& q, const at::Tensor& k, double scale) {
  return Signature("decode_attention")
      .add("shape of q", q.sizes())
      .add("key heads", k.size(2))
      .add("dtype", dtype_name(q.scalar_type()))
      .add("device type", c10::DeviceTypeName(q.device().type()))
      .add("scale", scale);
}

at::Tensor decode_attention_op(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double scale, c10::string_view group_name) {
  const c10::DeviceGuard guard(q.device());
  const auto group = group_name.empty() ? nullptr : RingGroup::resolve(std::string(group_name));
  if (!group || group->size() == 1) {
    check_attention(q, k, v, scale);
    return merge_partials(decode_partial(q, k, v, scale), q);
  }
  const int64_t call = group->begin_call(q.device().type(), [&] {
    check_attention(q, k, v, scale);
    group->check_device(q.device());
    Signature asked = signature(q, k, scale);
    check_capture(*group, asked, q.device(),
                  [&]() -> const MessageTransport& { return group->collectives(q.device()); });
    return asked;
  });
  return group->run(call, [&] {
    CollectiveTransport& transport = group->collectives(q.device());
    const at::Tensor partials = transport.all_gather(decode_partial(q, k, v, scale), call);
    const at::Tensor out = merge_partials(partials, q);
    transport.guard({out});
    return out;
  });
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("decode_attention", &decode_attention_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("decode_attention", &decode_attention_op); }
#endif

}  // namespace
}  // namespace ringattn
