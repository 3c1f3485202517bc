// SPDX-License-Identifier: Apache-2.0
#include "attention/block_attention_backward.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "attention/cpu/block_attention_backward.h"

#ifdef RINGATTN_WITH_CUDA
#include "attention/cuda/block_attention_backward.h"
#include "attention/sum_rows.h"
#include "attention/tensor_params.h"
#endif

namespace ringattn {

#ifdef RINGATTN_WITH_CUDA
namespace {

void find_delta_and_clear_dq(const at::Tensor& grad_out, const at::Tensor& grad_lse,
                             const at::Tensor& out, const at::Tensor& delta, const at::Tensor& dq) {
  const at::Tensor rows = unit_last_stride(grad_out), results = unit_last_stride(out);
  AttentionDeltaParams params;
  params.grad_out = strided(rows);
  params.out = strided(results);
  if (grad_lse.defined()) {
    params.grad_lse = grad_lse.const_data_ptr<float>();
    params.grad_lse_batch_stride = grad_lse.stride(0);
    params.grad_lse_head_stride = grad_lse.stride(1);
    params.grad_lse_row_stride = grad_lse.stride(2);
  }
  params.batch = static_cast<int32_t>(out.size(0));
  params.num_queries = static_cast<int32_t>(out.size(1));
  params.num_heads = static_cast<int32_t>(out.size(2));
  params.head_dim = static_cast<int32_t>(out.size(3));
  params.dtype = data_type(out.scalar_type());
  params.delta = delta.mutable_data_ptr<float>();
  params.dq = dq.mutable_data_ptr<float>();
  check_launch(cuda::attention_delta(params, current_stream(out)), "attention_delta");
}

void launch(const BlockAttentionBackwardParams& params, const at::Tensor& on_device) {
  check_launch(cuda::block_attention_backward(params, current_stream(on_device)),
               "block_attention_backward");
}

/// Each part of a group has dk and dv of its own, whose sums are rounded once.
void launch_in_parts(BlockAttentionBackwardParams& params, const at::Tensor& dk,
                     const at::Tensor& dv) {
  auto sizes = dk.sizes().vec();
  sizes.insert(sizes.begin(), {params.group_parts, 2});
  const at::Tensor parts = at::empty(sizes, dk.options().dtype(at::kFloat));
  const at::Tensor sum = parts.select(0, 0);
  params.dk = strided(sum.select(0, 0));
  params.dv = strided(sum.select(0, 1));
  params.next_part = parts.stride(0);
  params.rounds_key_gradients = false;
  launch(params, dk);
  std::vector<RowsToAdd> others;
  for (int64_t i = 1; i < params.group_parts; ++i) {
    others.push_back({parts.select(0, i), {0, dk.size(1)}});
  }
  if (dk.is_contiguous() && dv.is_contiguous()) return sum_rows(sum, others, {dk, dv});
  sum_rows(sum, others, {sum.select(0, 0), sum.select(0, 1)});
  dk.copy_(sum.select(0, 0));
  dv.copy_(sum.select(0, 1));
}

void block_attention_backward_cuda(const at::Tensor& q, const KeyBlock& block,
                                   const Scoring& scoring, const RowGradients& rows,
                                   const at::Tensor& dk, const at::Tensor& dv,
                                   Scheduling scheduling, bool leaves_room) {
  const at::Tensor queries = as_kernel_input(q), grad_out = as_kernel_input(rows.grad_out),
                   keys = as_kernel_input(block.k), values = as_kernel_input(block.v);
  BlockAttentionBackwardParams params;
  static_cast<AttentionShape&>(params) = attention_shape(q, keys.size(2), scoring.scale);
  params.q = strided(queries);
  params.k = strided(keys);
  params.v = strided(values);
  params.grad_out = strided(grad_out);
  params.lse = rows.lse.const_data_ptr<float>();
  params.delta = rows.delta.const_data_ptr<float>();
  params.lse_batch_stride = rows.lse.stride(0);
  params.lse_head_stride = rows.lse.stride(1);
  params.dq = strided(rows.dq);
  params.dk = strided(dk);
  params.dv = strided(dv);
  params.rounds_key_gradients = dk.scalar_type() != at::kFloat;
  params.num_keys = static_cast<int32_t>(keys.size(1));
  if (block.query_ranges.defined()) {
    params.query_ranges = block.query_ranges.const_data_ptr<int32_t>();
  } else {
    params.diagonal = static_cast<int32_t>(std::clamp(block.diagonal, -q.size(1), keys.size(1)));
    params.first_query = static_cast<int32_t>(block.first_query);
  }
  params.softcap = static_cast<float>(scoring.softcap);
  params.leaves_room = leaves_room;
  params.deterministic = at::globalContext().deterministicAlgorithms();
  at::Tensor semaphores;
  if (params.deterministic || params.query_ranges != nullptr ||
      scheduling == Scheduling::kDynamic || cuda::gains_by_semaphore(params)) {
    const int64_t count = params.deterministic ? params.num_semaphores() : 1;
    semaphores = at::zeros({count}, q.options().dtype(at::kInt));
    params.semaphores = semaphores.mutable_data_ptr<int32_t>();
  }
  params.group_parts = cuda::choose_group_parts(params);
  if (params.group_parts > 1) return launch_in_parts(params, dk, dv);
  launch(params, q);
}

}  // namespace
#endif

RowGradients row_gradients(const at::Tensor& grad_out, const at::Tensor& grad_lse,
                           const at::Tensor& out, const at::Tensor& lse) {
  const auto type = state_dtype(out.scalar_type());
  RowGradients rows = {grad_out, lse.contiguous()};
#ifdef RINGATTN_WITH_CUDA
  if (out.is_cuda()) {
    rows.delta = at::empty({out.size(0), out.size(2), out.size(1)}, out.options().dtype(type));
    rows.dq = at::empty(out.sizes(), rows.delta.options());
    find_delta_and_clear_dq(grad_out, grad_lse, out, rows.delta, rows.dq);
    return rows;
  }
#endif
  rows.delta = grad_out.to(type).mul(out.to(type)).sum(-1).transpose(1, 2).contiguous();
  if (grad_lse.defined()) rows.delta.sub_(grad_lse);
  rows.dq = at::zeros(out.sizes(), rows.delta.options());
  return rows;
}

at::Tensor sink_gradients(const at::Tensor& sinks, const at::Tensor& lse, const at::Tensor& delta) {
  // lse contains the sink; it is -inf only where the sink is, too.
  const at::Tensor weights =
      sinks.to(lse.scalar_type()).unsqueeze(-1).sub(lse).exp().masked_fill_(lse.isneginf(), 0.0);
  return weights.mul_(delta).sum(at::IntArrayRef({0, 2})).neg_();
}

at::Tensor transposed_ranges(const at::Tensor& key_ranges, int64_t num_keys) {
  // Row i sees key j when begin_i <= j and j < end_i: both bounds only rise.
  const at::Tensor keys = at::arange(num_keys, key_ranges.options());
  const auto rows_up_to = [&](int64_t column) {
    return at::searchsorted(key_ranges.select(1, column).contiguous(), keys, /*out_int32=*/true,
                            /*right=*/true);
  };
  return at::stack({rows_up_to(1), rows_up_to(0)}, 1);
}

void block_attention_backward(const at::Tensor& q, const KeyBlock& block, const Scoring& scoring,
                              const RowGradients& rows, const at::Tensor& dk, const at::Tensor& dv,
                              [[maybe_unused]] Scheduling scheduling,
                              [[maybe_unused]] bool leaves_room) {
  if (dk.numel() == 0 || q.numel() == 0) {
    dk.zero_();
    dv.zero_();
    return;
  }
#ifdef RINGATTN_WITH_CUDA
  if (q.is_cuda()) {
    return block_attention_backward_cuda(q, block, scoring, rows, dk, dv, scheduling, leaves_room);
  }
#endif
  cpu::block_attention_backward(q, block, scoring, rows, dk, dv);
}

}  // namespace ringattn
