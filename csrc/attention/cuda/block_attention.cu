// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/cuda/alignment.h"
#include "attention/cuda/block_attention.h"
#include "attention/cuda/sm80/launch.h"

namespace ringattn::cuda {
namespace {

template <typename Element>
cudaError_t dispatch_head_dim(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return sm80::launch_block_attention<Element, 64>(p, stream);
  if (p.head_dim <= 96) return sm80::launch_block_attention<Element, 96>(p, stream);
  if (p.head_dim <= 128) return sm80::launch_block_attention<Element, 128>(p, stream);
  if (p.head_dim <= 192) return sm80::launch_block_attention<Element, 192>(p, stream);
  if (p.head_dim <= 256) return sm80::launch_block_attention<Element, 256>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.num_queries == 0 || p.num_heads == 0) return cudaSuccess;
  switch (p.dtype) {
    case DataType::kFloat16:
      return dispatch_head_dim<__half>(p, stream);
    case DataType::kBFloat16:
      return dispatch_head_dim<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return dispatch_head_dim<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

bool aligned(const BlockAttentionParams& p) {
  const int bytes = element_bytes(p.dtype);
  return rows_are_aligned(p.q, bytes, p.batch, p.num_queries, p.num_heads) &&
         rows_are_aligned(p.k, bytes, p.batch, p.num_keys, p.num_kv_heads) &&
         rows_are_aligned(p.v, bytes, p.batch, p.num_keys, p.num_kv_heads) &&
         rows_are_aligned(p.out, bytes, p.batch, p.num_queries, p.num_heads) &&
         rows_are_aligned(p.state, 4, p.batch, p.num_queries, p.num_heads);
}

}  // namespace ringattn::cuda
