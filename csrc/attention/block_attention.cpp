// SPDX-License-Identifier: Apache-2.0
#include "attention/block_attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "attention/cpu/block_attention.h"
#include "core/log.h"
#include "testing/throttle.h"

#ifdef RINGATTN_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "attention/cuda/block_attention.h"
#include "attention/tensor_params.h"
#endif

namespace ringattn {

#ifdef RINGATTN_WITH_CUDA
namespace {

KeySegment key_segment(const KeyBlock& block, const at::Tensor& keys, const at::Tensor& values,
                       int64_t num_queries) {
  const int64_t num_keys = keys.size(1);
  KeySegment segment;
  segment.k = strided(keys);
  segment.v = strided(values);
  segment.num_keys = static_cast<int32_t>(num_keys);
  segment.source = block.source;
  segment.keys_behind = static_cast<int32_t>(block.keys_behind);
  if (block.key_ranges.defined()) {
    segment.key_ranges = block.key_ranges.const_data_ptr<int32_t>();
    segment.host_table = block.host_table;
  } else {
    segment.diagonal = static_cast<int32_t>(std::clamp(block.diagonal, -num_queries, num_keys));
    segment.first_query = static_cast<int32_t>(block.first_query);
  }
  return segment;
}

void block_attention_cuda(const at::Tensor& q, const std::vector<KeyBlock>& blocks,
                          const Scoring& scoring, const AttentionResult& result,
                          const LaunchOptions& options, const RemoteFetch& remote_fetch) {
  TORCH_INTERNAL_ASSERT(!blocks.empty());
  const at::Tensor queries = as_kernel_input(q);
  bool copied = !queries.is_same(q);
  std::vector<at::Tensor> inputs;  // alive until the launch
  std::vector<KeySegment> segments;
  for (const KeyBlock& block : blocks) {
    const at::Tensor keys = as_kernel_input(block.k), values = as_kernel_input(block.v);
    TORCH_INTERNAL_ASSERT(!block.is_remote() || (keys.is_same(block.k) && values.is_same(block.v)));
    segments.push_back(key_segment(block, keys, values, q.size(1)));
    inputs.insert(inputs.end(), {keys, values});
    copied = copied || !keys.is_same(block.k) || !values.is_same(block.v);
  }
  // A copy's kernel would run between the staging kernel and this launch, which must follow it.
  TORCH_INTERNAL_ASSERT(!remote_fetch.follows_staging || !copied);

  BlockAttentionParams params;
  static_cast<AttentionShape&>(params) =
      attention_shape(q, blocks.front().k.size(2), scoring.scale);
  static_cast<LaunchOptions&>(params) = options;
  params.q = strided(queries);
  params.segments = segments.data();
  params.num_segments = segments.size();
  params.remote_fetch = remote_fetch;
  params.fold = result.fold;
  params.max_blocks = std::min(options.max_blocks, sm_cap());
  params.final_begin = result.final_begin;
  params.final_end = result.final_end;

  params.softcap = static_cast<float>(scoring.softcap);
  if (scoring.sinks.defined()) params.sinks = scoring.sinks.const_data_ptr<float>();

  std::optional<InPlace> out, state;
  if (result.out.defined()) params.out = strided(out.emplace(result.out).tensor());
  if (result.state.defined()) params.state = strided(state.emplace(result.state).tensor());
  const InPlace lse(result.lse);
  params.lse = lse.tensor().data_ptr<float>();
  params.lse_batch_stride = lse.tensor().stride(0);
  params.lse_head_stride = lse.tensor().stride(1);
  check_launch(cuda::block_attention(params, current_stream(q)), "block_attention");
  log_info_once(cuda::supports_segment_lists(params)
                    ? "attention kernels: sm90, sm80 for short calls"
                    : "attention kernels: sm80");
}

}  // namespace
#endif

at::Tensor as_attention_input(const at::Tensor& x) {
#ifdef RINGATTN_WITH_CUDA
  if (x.is_cuda()) return as_kernel_input(x);
#endif
  return x;
}

bool supports_segment_lists(const at::Tensor& q) {
  if (!q.is_cuda()) return true;
#ifdef RINGATTN_WITH_CUDA
  if (q.numel() == 0) return false;
  return cuda::supports_segment_lists(attention_shape(q, /*num_kv_heads=*/1, /*scale=*/1.0));
#else
  return false;
#endif
}

std::vector<AttentionTile> attention_tiles(c10::Device device, at::ScalarType dtype,
                                           int64_t head_dim) {
#ifdef RINGATTN_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    return cuda::attention_tiles(data_type(dtype), static_cast<int>(head_dim));
  }
#endif
  return {};
}

void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks,
                     const Scoring& scoring, const AttentionResult& result,
                     const LaunchOptions& options, const RemoteFetch& remote_fetch) {
  if (q.numel() == 0) return;
#ifdef RINGATTN_WITH_CUDA
  if (q.is_cuda()) return block_attention_cuda(q, blocks, scoring, result, options, remote_fetch);
#endif
  log_info_once("attention kernels: cpu");
  cpu::block_attention(q, blocks, scoring, result);
}

std::pair<at::Tensor, at::Tensor> block_attention(const at::Tensor& q, const KeyBlock& block,
                                                  const Scoring& scoring,
                                                  at::ScalarType out_dtype) {
  if (q.is_cpu()) {
    const cpu::State state = cpu::attend(q, block, scoring);
    cpu::add_sinks(state, scoring);
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
  block_attention(q, {block}, scoring, result);
  return {result.out.defined() ? result.out : result.state, result.lse};
}

}  // namespace ringattn
