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
  int64_t window_left, window_right;
  double softcap;
  const std::optional<at::Tensor>&sinks, &cu_seqlens, &pieces;
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
  const auto add_tensor = [&](const at::Tensor& x) {
    add_integers(x.sizes());
    key.push_back(static_cast<int64_t>(x.scalar_type()));
    key.push_back(static_cast<int64_t>(x.device().type()));
    key.push_back(x.device().index());
  };
  for (const at::Tensor* x : {&args.q, &args.k, &args.v}) add_tensor(*x);
  add_integers(args.lengths);
  add_integers(args.order);
  add_text(args.layout);
  add_text(args.transport);
  key.push_back(args.causal);
  key.push_back(c10::bit_cast<int64_t>(args.scale));
  key.push_back(args.depth.has_value());
  key.push_back(args.depth.value_or(0));
  key.append({args.window_left, args.window_right, c10::bit_cast<int64_t>(args.softcap)});
  key.push_back(args.sinks.has_value());
  if (args.sinks) add_tensor(*args.sinks);
  for (const std::optional<at::Tensor>* x : {&args.cu_seqlens, &args.pieces}) {
    key.push_back(x->has_value());
    if (!x->has_value()) continue;
    add_tensor(**x);
    // Others are refused.
    if (is_host_integers(**x)) add_integers(values_of(**x));
  }
  return key;
}

// A call that has passed its checks, with what follows from its arguments.
struct PreparedCall {
  std::string transport;
  RingPlan plan;
  std::shared_ptr<const Signature> signature;
};

// The latest kinds of calls of one group, or of single ranks, so that a repeated call is a look-up.
struct PreparedCalls : LruCache<CallKey, std::shared_ptr<const PreparedCall>> {
  // A CUDA graph reads the tables of the call that it holds for as long as it lives.
  std::vector<std::shared_ptr<const PreparedCall>> captured;
};

// A table is made outside of graphs, and those that a graph reads are kept.
void keep_if_captured(const std::shared_ptr<const PreparedCall>& prepared, c10::Device device,
                      PreparedCalls& calls) {
  const KeyTables& tables = *prepared->plan.key_tables;
  if (!tables.any() || !is_captured(device)) return;
  RINGATTN_CHECK(!tables.must_be_made(device),
                 "a call must have been made once before one of its kind is captured in a CUDA "
                 "graph, got a first one under capture");
  calls.captured.push_back(prepared);
}

Partition check(const Arguments& args, int64_t rank, int64_t world_size) {
  check_attention(args.q, args.k, args.v, args.scale);
  check_scoring(args.q, args.softcap, args.sinks);
  Partition partition = check_partition(args.lengths.vec(), args.order.vec(),
                                        std::string(args.layout), world_size, args.pieces);
  check_rows(args.q, "q", partition, rank);
  check_rows(args.k, "k", partition, rank);
  RINGATTN_CHECK(args.depth.value_or(1) >= 1, "depth must be positive, got ", *args.depth);
  check_transport(std::string(args.transport), args.q.device().type());
  return partition;
}

// Without the depth: each rank may receive as far ahead as it chooses.
Signature signature(const Arguments& args, const Partition& partition) {
  Signature signature("ring_forward");
  signature.add("partition.lengths", partition.lengths())
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
      .add("window_size", {args.window_left, args.window_right})
      .add("softcap", args.softcap)
      .add("sinks", args.sinks ? dtype_name(args.sinks->scalar_type()) : std::string("none"))
      .add("transport", args.transport);
  if (args.cu_seqlens) signature.add("cu_seqlens", values_of(*args.cu_seqlens));
  if (args.pieces) signature.add("partition.pieces", values_of(*args.pieces));
  return signature;
}

std::shared_ptr<const PreparedCall> prepare(const Arguments& args, int64_t rank,
                                            int64_t world_size) {
  const Partition partition = check(args, rank, world_size);
  const Mask mask = check_mask({args.causal, args.window_left, args.window_right, args.cu_seqlens},
                               partition.seq_len());
  return std::make_shared<const PreparedCall>(
      PreparedCall{std::string(args.transport), plan_ring(partition, rank, mask),
                   std::make_shared<const Signature>(signature(args, partition))});
}

std::tuple<at::Tensor, at::Tensor> ring_forward_op(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef lengths,
    at::IntArrayRef order, c10::string_view layout, bool causal, double scale,
    c10::string_view group_name, c10::string_view transport, std::optional<int64_t> depth,
    int64_t window_left, int64_t window_right, double softcap,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& cu_seqlens,
    const std::optional<at::Tensor>& pieces) {
  const Arguments args{q,       k,     v,          lengths, order,       layout,
                       causal,  scale, transport,  depth,   window_left, window_right,
                       softcap, sinks, cu_seqlens, pieces};
  const c10::DeviceGuard guard(q.device());
  const auto group = group_name.empty() ? nullptr : GroupContext::resolve(std::string(group_name));
  const CallEntry entry(group.get(), "ring_forward");
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
    keep_if_captured(prepared, q.device(), calls);
    const RingCall ring{prepared->plan, make_scoring(q, scale, softcap, sinks)};
    return ring_forward(q, k, v, ring, nullptr);
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
    keep_if_captured(prepared, q.device(), calls);
  });
  const int64_t call = group->begin_call(prepared->signature, /*tagged=*/q.is_cpu());
  MessageTransport& carrier = group->transport(prepared->transport, q.device());
  // Not earlier: the group's device is settled by its first transport.
  if (!repeated) calls.insert(std::move(key), prepared);
  RingCall ring{prepared->plan, make_scoring(q, scale, softcap, sinks)};
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
