// SPDX-License-Identifier: Apache-2.0
#include "attention/block_attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "attention/cpu/block_attention.h"

#ifdef RINGATTN_WITH_CUDA
#include "attention/cuda/block_attention.h"
#include "attention/kernel_params.h"
#endif

namespace ringattn {

at::ScalarType state_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

#ifdef RINGATTN_WITH_CUDA
namespace {

void block_attention_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, std::optional<int64_t> diagonal,
                          const AttentionResult& result) {
  const at::Tensor queries = kernel_ready(q), keys = kernel_ready(k), values = kernel_ready(v);
  const int64_t num_queries = q.size(1), num_keys = k.size(1);

  BlockAttentionParams params;
  params.q = strided(queries);
  KeySegment segment;
  segment.k = strided(keys);
  segment.v = strided(values);
  segment.num_keys = num_keys;
  segment.diagonal = std::clamp(diagonal.value_or(num_keys), -num_queries, num_keys);
  params.segments = &segment;
  params.num_segments = 1;
  params.batch = q.size(0);
  params.num_queries = num_queries;
  params.num_heads = q.size(2);
  params.num_kv_heads = k.size(2);
  params.head_dim = q.size(3);
  params.scale = scale;
  params.dtype = data_type(q.scalar_type());
  params.fold = result.fold;
  params.final_begin = result.final_begin;
  params.final_end = result.final_end;

  std::optional<InPlace> out, state;
  if (result.out.defined()) params.out = strided(out.emplace(result.out).tensor());
  if (result.state.defined()) params.state = strided(state.emplace(result.state).tensor());
  const InPlace lse(result.lse);
  params.lse = lse.tensor().data_ptr<float>();
  params.lse_batch_stride = lse.tensor().stride(0);
  params.lse_head_stride = lse.tensor().stride(1);
  check_launch(cuda::block_attention(params, current_stream(q)), "block_attention");
}

}  // namespace
#endif

void block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                     std::optional<int64_t> diagonal, const AttentionResult& result) {
  if (q.numel() == 0) return;
#ifdef RINGATTN_WITH_CUDA
  if (q.is_cuda()) return block_attention_cuda(q, k, v, scale, diagonal, result);
#endif
  cpu::block_attention(q, k, v, scale, diagonal, result);
}

std::pair<at::Tensor, at::Tensor> block_attention(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, double scale,
                                                  std::optional<int64_t> diagonal,
                                                  at::ScalarType out_dtype) {
  if (q.is_cpu()) {
    const cpu::State state = cpu::attend(q, k, v, scale, diagonal);
    return {state.out.to(out_dtype).contiguous(), state.lse.contiguous()};
  }
  const auto wide = q.options().dtype(state_dtype(q.scalar_type()));
  AttentionResult result;
  result.lse = at::empty({q.size(0), q.size(2), q.size(1)}, wide);
  if (out_dtype == q.scalar_type()) {
    result.out = at::empty(q.sizes(), q.options());
    result.final_end = q.size(1);
  } else {
    result.state = at::empty(q.sizes(), wide);
  }
  block_attention(q, k, v, scale, diagonal, result);
  return {result.out.defined() ? result.out : result.state, result.lse};
}

}  // namespace ringattn
