// SPDX-License-Identifier: Apache-2.0
#include "ops/ring_call.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/bit_cast.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/lru_cache.h"
#include "core/process_singleton.h"
#include "ops/checks.h"
#include "transport/group/group_context.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

// Everything that check(), signature() and plan_ring() read of the arguments: two calls of equal
// keys on one group have equal results of these. The environment and strides are not part of it.
using CallKey = c10::SmallVector<int64_t, 80>;  // without an allocation for up to 16 ranks

CallKey call_key(const RingArguments& args) {
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
  const auto add_host_integers = [&](const std::optional<at::Tensor>& x) {
    key.push_back(x.has_value());
    if (!x) return;
    add_tensor(*x);
    if (is_host_integers(*x)) add_integers(values_of(*x));  // others are refused
  };
  const auto add_partition = [&](const PartitionArguments& partition) {
    add_integers(partition.lengths);
    add_integers(partition.order);
    add_text(partition.layout);
    add_host_integers(partition.pieces);
  };
  for (const at::Tensor* x : {&args.q, &args.k, &args.v}) add_tensor(*x);
  add_partition(args.queries);
  key.push_back(args.keys.has_value());
  if (args.keys) add_partition(*args.keys);
  add_text(args.transport);
  key.push_back(args.causal);
  key.push_back(c10::bit_cast<int64_t>(args.scale));
  key.push_back(args.depth.has_value());
  key.push_back(args.depth.value_or(0));
  key.append({args.window_left, args.window_right, c10::bit_cast<int64_t>(args.softcap)});
  key.push_back(args.sinks.has_value());
  if (args.sinks) add_tensor(*args.sinks);
  add_host_integers(args.cu_seqlens);
  return key;
}

// The inputs of a forward whose gradients a backward will be asked for: bits of q, k, v and sinks.
// Ranks that do not agree about them would not all call the backward.
constexpr int kNumGradientSets = 16;

int gradient_set(const RingArguments& args) {
  if (!c10::GradMode::is_enabled()) return 0;
  const auto bit = [](const at::Tensor& x, int place) { return x.requires_grad() ? place : 0; };
  return bit(args.q, 1) | bit(args.k, 2) | bit(args.v, 4) | (args.sinks ? bit(*args.sinks, 8) : 0);
}

std::string names_of(int gradient_set) {
  std::string names;
  for (const char* name : {"q", "k", "v", "sinks"}) {
    if (gradient_set & 1) names += names.empty() ? name : std::string(", ") + name;
    gradient_set >>= 1;
  }
  return names.empty() ? "none" : names;
}

// Of queries and of keys.
struct Partitions {
  Partition queries, keys;
};

// A call that has passed its checks, with what follows from its arguments. Both passes share it.
struct PreparedCall {
  std::string transport;
  Partitions partitions;
  RingPlan plan;
  // What the ranks agree on: in a forward, by its gradient set, and in a backward.
  std::array<std::shared_ptr<const Signature>, kNumGradientSets> forward;
  std::shared_ptr<const Signature> backward;
};

// A CUDA graph reads the tables of the call that it holds for as long as it lives.
using CapturedCalls = std::vector<std::shared_ptr<const PreparedCall>>;

// The latest kinds of calls of one group, or of single ranks, so that a repeated call is a look-up.
struct PreparedCalls : LruCache<CallKey, std::shared_ptr<PreparedCall>> {
  CapturedCalls captured;  // of a group
};

// Graphs of single ranks outlive the thread that has captured them.
struct CapturedAlone {
  std::mutex mutex;
  CapturedCalls calls;
};

std::mutex end_mutex;
bool process_ends = false;  // under end_mutex

// Calls of single ranks in one thread. Threads of torch's autograd end when the engine is
// destroyed, beside the CUDA driver, which frees no table then. The engine was there before the
// thread: a handler of the thread's own runs before the engine is destroyed.
struct SingleCalls {
  std::unique_ptr<PreparedCalls> calls = std::make_unique<PreparedCalls>();

  SingleCalls() {
    std::atexit([] {
      const std::lock_guard<std::mutex> lock(end_mutex);
      process_ends = true;
    });
  }
  ~SingleCalls() {
    const std::lock_guard<std::mutex> lock(end_mutex);
    if (process_ends) {
      static_cast<void>(calls.release());
    } else {
      calls.reset();
    }
  }
};

// Whether a graph will read tables of this call, which must be kept. They are made outside of
// graphs.
bool tables_are_captured(const PreparedCall& prepared, c10::Device device) {
  const KeyTables& tables = *prepared.plan.key_tables;
  if (!tables.any() || !is_captured(device)) return false;
  RINGATTN_CHECK(!tables.must_be_made(device),
                 "a call must have been made once before one of its kind is captured in a CUDA "
                 "graph, got a first one under capture");
  return true;
}

Partitions check(const RingArguments& args, int64_t rank, int64_t world_size) {
  check_attention(args.q, args.k, args.v, args.scale);
  check_scoring(args.q, args.softcap, args.sinks);
  const auto checked = [&](const PartitionArguments& given, const char* name) {
    return check_partition(given.lengths.vec(), given.order.vec(), std::string(given.layout),
                           world_size, given.pieces, name);
  };
  Partition queries = checked(args.queries, "partition");
  Partition keys = args.keys ? checked(*args.keys, "key_partition") : queries;
  RINGATTN_CHECK(queries.seq_len() <= keys.seq_len(),
                 "key_partition must have at least as many tokens as partition, ",
                 queries.seq_len(), ", got ", keys.seq_len());
  check_rows(args.q, "q", queries, rank);
  check_rows(args.k, "k", keys, rank, args.keys ? "key_partition" : "partition");
  RINGATTN_CHECK(args.depth.value_or(1) >= 1, "depth must be positive, got ", *args.depth);
  check_transport(std::string(args.transport), args.q.device().type());
  return {std::move(queries), std::move(keys)};
}

// Without the depth: each rank may receive as far ahead as it chooses.
Signature make_signature(const RingArguments& args, RingPass pass, const Partitions& partitions) {
  Signature signature(pass == RingPass::kForward ? "ring_forward" : "ring_backward");
  signature.add("partition.order", partitions.queries.order())
      .add("partition.layout", args.queries.layout)
      .add("key_partition", args.keys ? "given" : "none")
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
  if (pass == RingPass::kForward) {
    signature.add("inputs that require grad", names_of(gradient_set(args)));
  }
  if (args.keys) {
    signature.add("key_partition.order", partitions.keys.order())
        .add("key_partition.layout", args.keys->layout);
  }
  // Other documents, and how they are divided, come with every step of a training; more keys with
  // every turn of a chat.
  signature.in_every_call().add("partition.lengths", partitions.queries.lengths());
  if (args.queries.pieces) signature.add("partition.pieces", values_of(*args.queries.pieces));
  if (args.keys) signature.add("key_partition.lengths", partitions.keys.lengths());
  if (args.keys && args.keys->pieces) {
    signature.add("key_partition.pieces", values_of(*args.keys->pieces));
  }
  if (args.cu_seqlens) {
    signature.add("cu_seqlens", values_of(*args.cu_seqlens));
  } else {
    signature.add("cu_seqlens", "none");
  }
  return signature;
}

const std::shared_ptr<const Signature>& signature_of(PreparedCall& prepared,
                                                     const RingArguments& args, RingPass pass) {
  auto& signature =
      pass == RingPass::kForward ? prepared.forward[gradient_set(args)] : prepared.backward;
  if (!signature) {
    signature = std::make_shared<const Signature>(make_signature(args, pass, prepared.partitions));
  }
  return signature;
}

std::shared_ptr<PreparedCall> prepare(const RingArguments& args, int64_t rank, int64_t world_size) {
  Partitions partitions = check(args, rank, world_size);
  const Mask mask = check_mask({args.causal, args.window_left, args.window_right, args.cu_seqlens},
                               partitions.keys.seq_len());
  RingPlan plan = plan_ring(partitions.queries, partitions.keys, rank, mask);
  return std::make_shared<PreparedCall>(
      PreparedCall{std::string(args.transport), std::move(partitions), std::move(plan), {}, {}});
}

}  // namespace

std::optional<PartitionArguments> key_partition(at::OptionalIntArrayRef lengths,
                                                at::OptionalIntArrayRef order,
                                                std::optional<std::string_view> layout,
                                                const std::optional<at::Tensor>& pieces) {
  if (!lengths && !order && !layout && !pieces) return std::nullopt;
  return PartitionArguments{lengths.value_or(at::IntArrayRef()), order.value_or(at::IntArrayRef()),
                            layout.value_or(""), pieces};
}

void ring_call(const RingArguments& args, RingPass pass, c10::function_ref<void()> check_more,
               c10::function_ref<void(const RingCall&, MessageTransport*)> body) {
  const c10::DeviceGuard guard(args.q.device());
  const auto group =
      args.group_name.empty() ? nullptr : GroupContext::resolve(std::string(args.group_name));
  const CallEntry entry(group.get(), pass == RingPass::kForward ? "ring_forward" : "ring_backward");
  const bool alone = !group || group->size() == 1;
  static thread_local SingleCalls single_calls;
  PreparedCalls& calls = alone ? *single_calls.calls : group->state<PreparedCalls>();
  CallKey key = call_key(args);
  const std::shared_ptr<PreparedCall>* known = calls.find(key);
  const bool repeated = known != nullptr;
  std::shared_ptr<PreparedCall> prepared = repeated ? *known : nullptr;
  const auto make_call = [&] {
    return RingCall{prepared->plan, make_scoring(args.q, args.scale, args.softcap, args.sinks)};
  };
  if (alone) {
    if (!repeated) calls.insert(std::move(key), prepared = prepare(args, 0, 1));
    check_more();
    check_environment();
    if (tables_are_captured(*prepared, args.q.device())) {
      auto& captured = process_singleton<CapturedAlone>();
      const std::lock_guard<std::mutex> lock(captured.mutex);
      captured.calls.push_back(prepared);
    }
    return body(make_call(), nullptr);
  }
  check_call(*group, [&] {
    if (!repeated) {
      prepared = prepare(args, group->rank(), group->size());
      group->check_device(args.q.device(), prepared->transport);
    }
    check_more();
    check_environment();
    check_capture(*group, *signature_of(*prepared, args, pass), args.q.device(),
                  [&]() -> const MessageTransport& {
                    return group->transport(prepared->transport, args.q.device());
                  });
    if (tables_are_captured(*prepared, args.q.device())) calls.captured.push_back(prepared);
  });
  const std::shared_ptr<const Signature>& signature = signature_of(*prepared, args, pass);
  const int64_t number = group->begin_call(signature, /*tagged=*/args.q.is_cpu(), [&] {
    const RingPlan& plan = prepared->plan;
    const auto dtype = args.k.scalar_type();
    const int64_t returned =
        pass == RingPass::kForward ? 0 : plan.largest_message(args.k, state_dtype(dtype));
    return group->transport(prepared->transport, args.q.device())
        .compares_tags(plan.largest_message(args.k, dtype), plan.messages_of_round() * returned);
  });
  MessageTransport& carrier = group->transport(prepared->transport, args.q.device());
  // Not earlier: the group's device is settled by its first transport.
  if (!repeated) calls.insert(std::move(key), prepared);
  RingCall call = make_call();
  call.depth = args.depth.value_or(group->size());
  call.number = number;
  group->run(number, [&] { body(call, &carrier); });
}

}  // namespace ringattn
