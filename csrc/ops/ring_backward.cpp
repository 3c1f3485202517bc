// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_backward.h"

#include <torch/library.h>

#include <tuple>

#include "ops/gradient_arguments.h"
#include "ops/ring_call.h"

namespace ringattn {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> ring_backward_op(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    at::IntArrayRef lengths, at::IntArrayRef order, c10::string_view layout, bool causal,
    double scale, c10::string_view group_name, c10::string_view transport,
    std::optional<int64_t> depth, int64_t window_left, int64_t window_right, double softcap,
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
  const GradientArguments given{grad_out, grad_lse, out, lse};
  RingGradients result;
  at::Tensor dsinks;
  const auto check = [&] { check_gradients(given, q); };
  const auto run = [&](const RingCall& call, MessageTransport* transport) {
    RowGradients rows;
    const auto make_rows = [&] { return rows = row_gradients(given); };
    result = ring_backward(q, k, v, make_rows, call, transport);
    dsinks = gradient_of_sinks(sinks, rows);
  };
  ring_call(args, RingPass::kBackward, check, run);
  return {result.dq, result.dk, result.dv, dsinks};
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("ring_backward", &ring_backward_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("ring_backward", &ring_backward_op); }
#endif

}  // namespace
}  // namespace ringattn
