// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_forward.h"

#include <torch/library.h>

#include <tuple>

#include "ops/ring_call.h"

namespace ringattn {
namespace {

std::tuple<at::Tensor, at::Tensor> ring_forward_op(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef lengths,
    at::IntArrayRef order, c10::string_view layout, bool causal, double scale,
    c10::string_view group_name, c10::string_view transport, std::optional<int64_t> depth,
    int64_t window_left, int64_t window_right, double softcap,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& cu_seqlens,
    const std::optional<at::Tensor>& pieces, at::OptionalIntArrayRef key_lengths,
    at::OptionalIntArrayRef key_order, std::optional<c10::string_view> key_layout,
    const std::optional<at::Tensor>& key_pieces) {
  const RingArguments args{q,
                           k,
                           v,
                           {lengths, order, layout, pieces},
                           key_partition(key_lengths, key_order, key_layout, key_pieces),
                           causal,
                           scale,
                           group_name,
                           transport,
                           depth,
                           window_left,
                           window_right,
                           softcap,
                           sinks,
                           cu_seqlens};
  std::pair<at::Tensor, at::Tensor> result;
  const auto run = [&](const RingCall& call, MessageTransport* transport) {
    result = ring_forward(q, k, v, call, transport);
  };
  ring_call(
      args, RingPass::kForward, /*check=*/[] {}, run);
  return result;
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("ring_forward", &ring_forward_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("ring_forward", &ring_forward_op); }
#endif

}  // namespace
}  // namespace ringattn
