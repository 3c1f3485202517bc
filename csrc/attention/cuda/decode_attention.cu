// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attention/cuda/decode_attention.h"
#include "attention/cuda/merge_states.h"
#include "attention/cuda/sm80/launch.h"

namespace ringattn::cuda {
namespace {

constexpr int kRowsPerBlock = 16;
constexpr int kBlocksPerSm = 3;
constexpr int kMinKeysPerSplit = 256;  // below, starting a block costs more than its keys

/// The number of splits that fills the device once.
int num_splits(const DecodeAttentionParams& p, int num_sms) {
  const int64_t row_tiles =
      (int64_t{p.num_heads} / p.num_kv_heads * p.num_queries + kRowsPerBlock - 1) / kRowsPerBlock;
  const int64_t blocks = std::max<int64_t>(1, row_tiles * p.num_kv_heads * p.batch);
  const int64_t filling = std::max<int64_t>(1, int64_t{kBlocksPerSm} * num_sms / blocks);
  const int64_t longest =
      std::max<int64_t>(1, (int64_t{p.num_keys} + kMinKeysPerSplit - 1) / kMinKeysPerSplit);
  return static_cast<int>(std::min(filling, longest));
}

/// Whether splits go through the workspace: where there are several, or the result is to be
/// rounded.
bool needs_merge(const DecodeAttentionParams& p, int splits) {
  return splits > 1 || p.out_dtype != DataType::kFloat32;
}

/// Whether the result is empty states, for which no kernel of attention needs to run.
bool is_empty(const DecodeAttentionParams& p) { return p.num_keys == 0 && p.sinks == nullptr; }

int64_t num_rows(const DecodeAttentionParams& p) {
  return int64_t{p.batch} * p.num_queries * p.num_heads;
}

template <typename Element>
cudaError_t dispatch_head_dim(const DecodeAttentionParams& p, int splits, cudaStream_t stream) {
  if (p.head_dim <= 64) return sm80::launch_decode_attention<Element, 64>(p, splits, stream);
  if (p.head_dim <= 128) return sm80::launch_decode_attention<Element, 128>(p, splits, stream);
  if (p.head_dim <= 256) return sm80::launch_decode_attention<Element, 256>(p, splits, stream);
  return cudaErrorInvalidValue;
}

cudaError_t dispatch(const DecodeAttentionParams& p, int splits, cudaStream_t stream) {
  switch (p.dtype) {
    case DataType::kFloat16:
      return dispatch_head_dim<__half>(p, splits, stream);
    case DataType::kBFloat16:
      return dispatch_head_dim<__nv_bfloat16>(p, splits, stream);
    case DataType::kFloat32:
      return dispatch_head_dim<float>(p, splits, stream);
  }
  return cudaErrorInvalidValue;
}

/// Merges `splits` states lying in the workspace (none: an empty state) into the result.
cudaError_t merge_splits(const DecodeAttentionParams& p, int splits, cudaStream_t stream) {
  MergeStatesParams m;
  m.batch = p.batch;
  m.num_queries = p.num_queries;
  m.num_heads = p.num_heads;
  m.head_dim = p.head_dim;
  m.set_contiguous(p.out, p.lse, p.workspace, p.workspace + splits * num_rows(p) * p.head_dim);
  m.next_state = num_rows(p) * p.head_dim;
  m.next_state_lse = num_rows(p);
  m.num_states = splits;
  m.out_dtype = p.out_dtype;
  m.follows_closely = splits > 0;
  return merge_states(m, stream);
}

}  // namespace

int64_t decode_workspace_floats(const DecodeAttentionParams& p, int num_sms) {
  if (p.num_kv_heads == 0 || is_empty(p)) return 0;
  const int splits = num_splits(p, num_sms);
  return needs_merge(p, splits) ? splits * num_rows(p) * (p.head_dim + 1) : 0;
}

cudaError_t decode_attention(const DecodeAttentionParams& p, cudaStream_t stream) {
  if (num_rows(p) == 0) return cudaSuccess;
  if (is_empty(p)) return merge_splits(p, 0, stream);
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int splits = num_splits(p, num_sms);
  error = dispatch(p, splits, stream);
  if (error != cudaSuccess || !needs_merge(p, splits)) return error;
  return merge_splits(p, splits, stream);
}

}  // namespace ringattn::cuda
