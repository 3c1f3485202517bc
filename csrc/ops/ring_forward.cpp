// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_forward.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <c10/util/bit_cast.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/lru_cache.h"
#include "ops/checks.h"
#include "transport/group/group_context.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

struct Arguments {
  const at::Tensor &q, &k, &v;
  at::IntArrayRef lengths, order;
  std::string_view layout;
  bool causal;
  double scale;
  std::string_view transport;
  std::optional<int64_t> depth;
};

// Everything that check(), signature() and plan_ring() read of the arguments: two calls of equal
// keys on one group have equal results of these. The environment and strides are not part of it.
using CallKey = c10::SmallVector<int64_t, 80>;  // without an allocation for up to 16 ranks

CallKey call_key(const Arguments& args) {
  CallKey key;
  const auto add_integers = [&](at::IntArrayRef values) {
    key.push_back(static_cast<int64_t>(values.size()));
    key.append(values.begin(), values.end());
  };
  const auto add_text = [&](std::string_view text) {
    key.push_back(static_cast<int64_t>(text.size()));
    key.append(text.begin(), text.end());
  };
  for (const at::Tensor* x : {&args.q, &args.k, &args.v}) {
    add_integers(x->sizes());
    key.push_back(static_cast<int64_t>(x->scalar_type()));
    key.push_back(static_cast<int64_t>(x->device().type()));
    key.push_back(x->device().index());
  }
  add_integers(args.lengths);
  add_integers(args.order);
  add_text(args.layout);
  add_text(args.transport);
  key.push_back(args.causal);
  key.push_back(c10::bit_cast<int64_t>(args.scale));
  key.push_back(args.depth.has_value());
  key.push_back(args.depth.value_or(0));
  return key;
}

// A call that has passed its checks, with what follows from its arguments.
struct PreparedCall {
  std::string transport;
  RingPlan plan;
  std::shared_ptr<const Signature> signature;
};

// The latest kinds of calls of one group, or of single ranks, so that a repeated call is a look-up.
using PreparedCalls = LruCache<CallKey, std::shared_ptr<const PreparedCall>>;

Partition check(const Arguments& args, int64_t rank, int64_t world_size) {
  check_attention(args.q, args.k, args.v, args.scale);
  Partition partition =
      check_partition(args.lengths.vec(), args.order.vec(), std::string(args.layout), world_size);
  check_rows(args.q, "q", partition, rank);
  check_rows(args.k, "k", partition, rank);
  RINGATTN_CHECK(args.depth.value_or(1) >= 1, "depth must be positive, got ", *args.depth);
  check_transport(std::string(args.transport), args.q.device().type());
  return partition;
}

// Without the depth: each rank may receive as far ahead as it chooses.
Signature signature(const Arguments& args, const Partition& partition) {
  return Signature("ring_forward")
      .add("partition.lengths", partition.lengths())
      .add("partition.order", partition.order())
      .add("partition.layout", args.layout)
      .add("dtype", dtype_name(args.q.scalar_type()))
      .add("device type", c10::DeviceTypeName(args.q.device().type()))
      .add("batch size", args.q.size(0))
      .add("query heads", args.q.size(2))
      .add("key heads", args.k.size(2))
      .add("head dimension", args.q.size(3))
      .add("causal", args.causal)
      .add("scale", args.scale)
      .add("transport", args.transport);
}

std::shared_ptr<const PreparedCall> prepare(const Arguments& args, int64_t rank,
                                            int64_t world_size) {
  const Partition partition = check(args, rank, world_size);
  return std::make_shared<const PreparedCall>(
      PreparedCall{std::string(args.transport), plan_ring(partition, rank, {args.causal}),
                   std::make_shared<const Signature>(signature(args, partition))});
}

std::tuple<at::Tensor, at::Tensor> ring_forward_op(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef lengths,
    at::IntArrayRef order, c10::string_view layout, bool causal, double scale,
    c10::string_view group_name, c10::string_view transport, std::optional<int64_t> depth) {
  const Arguments args{q, k, v, lengths, order, layout, causal, scale, transport, depth};
  const c10::DeviceGuard guard(q.device());
  const auto group = group_name.empty() ? nullptr : GroupContext::resolve(std::string(group_name));
  const bool alone = !group || group->size() == 1;
  static thread_local PreparedCalls single_calls;
  PreparedCalls& calls = alone ? single_calls : group->state<PreparedCalls>();
  CallKey key = call_key(args);
  const std::shared_ptr<const PreparedCall>* known = calls.find(key);
  const bool repeated = known != nullptr;
  std::shared_ptr<const PreparedCall> prepared = repeated ? *known : nullptr;
  if (alone) {
    if (!repeated) calls.insert(std::move(key), prepared = prepare(args, 0, 1));
    check_environment();
    return ring_forward(q, k, v, RingCall{prepared->plan, scale}, nullptr);
  }
  check_call(*group, [&] {
    if (!repeated) {
      prepared = prepare(args, group->rank(), group->size());
      group->check_device(q.device(), prepared->transport);
    }
    check_environment();
    check_capture(*group, *prepared->signature, q.device(), [&]() -> const MessageTransport& {
      return group->transport(prepared->transport, q.device());
    });
  });
  const int64_t call = group->begin_call(prepared->signature, /*tagged=*/q.is_cpu());
  MessageTransport& carrier = group->transport(prepared->transport, q.device());
  // Not earlier: the group's device is settled by its first transport.
  if (!repeated) calls.insert(std::move(key), prepared);
  RingCall ring{prepared->plan, scale};
  ring.depth = depth.value_or(group->size());
  ring.number = call;
  return group->run(call, [&]() -> std::tuple<at::Tensor, at::Tensor> {
    return ring_forward(q, k, v, ring, &carrier);
  });
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("ring_forward", &ring_forward_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("ring_forward", &ring_forward_op); }
#endif

}  // namespace
}  // namespace ringattn
