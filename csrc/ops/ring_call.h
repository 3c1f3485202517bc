// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "ring/ring_plan.h"
#include "transport/p2p_transport.h"

// What the operators of a ring have in common: arguments, their checks, what the ranks agree on,
// and the memory of calls that were made before.

namespace ringattn {

struct PartitionArguments {
  at::IntArrayRef lengths, order;
  std::string_view layout;
  const std::optional<at::Tensor>& pieces;
};

/// Of the keys; none without lengths.
std::optional<PartitionArguments> key_partition(at::OptionalIntArrayRef lengths,
                                                at::OptionalIntArrayRef order,
                                                std::optional<std::string_view> layout,
                                                const std::optional<at::Tensor>& pieces);

/// Arguments of ring_forward; ring_backward has the same behind its own.
struct RingArguments {
  const at::Tensor &q, &k, &v;
  PartitionArguments queries;
  std::optional<PartitionArguments> keys;  // none: as the queries
  bool causal;
  double scale;
  std::string_view group_name;
  std::string_view transport;
  std::optional<int64_t> depth;
  int64_t window_left, window_right;
  double softcap;
  const std::optional<at::Tensor>&sinks, &cu_seqlens;
};

enum class RingPass : int8_t { kForward, kBackward };

/// Runs one pass of a ring as a collective call. `check` refuses arguments that are the pass's own,
/// before anything is sent; `body` runs it, with a null transport on a single rank.
void ring_call(const RingArguments& args, RingPass pass, c10::function_ref<void()> check,
               c10::function_ref<void(const RingCall&, MessageTransport*)> body);

}  // namespace ringattn
