// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_forward.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "ops/checks.h"
#include "transport/group/group_context.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

struct Arguments {
  const at::Tensor &q, &k, &v;
  std::vector<int64_t> lengths, order;
  std::string layout;
  bool causal;
  double scale;
  std::string transport;
  std::optional<int64_t> depth;
};

Partition check(const Arguments& args, int64_t rank, int64_t world_size) {
  check_attention(args.q, args.k, args.v, args.scale);
  Partition partition = check_partition(args.lengths, args.order, args.layout, world_size);
  check_rows(args.q, "q", partition, rank);
  check_rows(args.k, "k", partition, rank);
  RINGATTN_CHECK(args.depth.value_or(1) >= 1, "depth must be positive, got ", *args.depth);
  check_transport(args.transport, args.q.device().type());
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

std::tuple<at::Tensor, at::Tensor> ring_forward_op(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef lengths,
    at::IntArrayRef order, c10::string_view layout, bool causal, double scale,
    c10::string_view group_name, c10::string_view transport, std::optional<int64_t> depth) {
  const Arguments args{q,
                       k,
                       v,
                       lengths.vec(),
                       order.vec(),
                       std::string(layout),
                       causal,
                       scale,
                       std::string(transport),
                       depth};
  const c10::DeviceGuard guard(q.device());
  const auto group = group_name.empty() ? nullptr : GroupContext::resolve(std::string(group_name));
  if (!group || group->size() == 1) {
    const Partition partition = check(args, 0, 1);
    return ring_forward(q, k, v, RingCall{partition, 0, {causal}, scale}, nullptr);
  }
  std::optional<Partition> partition;
  Signature asked = check_call(*group, [&] {
    partition = check(args, group->rank(), group->size());
    group->check_device(q.device(), args.transport);
    Signature made = signature(args, *partition);
    check_capture(*group, made, q.device(), [&]() -> const MessageTransport& {
      return group->transport(args.transport, q.device());
    });
    return made;
  });
  const int64_t call = group->begin_call(std::move(asked), /*tagged=*/q.is_cpu());
  MessageTransport& carrier = group->transport(args.transport, q.device());
  RingCall ring{*partition, group->rank(), {causal}, scale};
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
