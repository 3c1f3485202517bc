// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/cuda/block_attention.h"
#include "attention/cuda/kernel_choice.h"
#include "attention/cuda/sm80/launch.h"
#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/scheduler/tile_selection.h"

namespace ringattn::cuda {
namespace {

template <typename Element>
cudaError_t dispatch_intervals(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return sm80::launch_interval_attention<Element, 64>(p, stream);
  if (p.head_dim <= 96) return sm80::launch_interval_attention<Element, 96>(p, stream);
  if (p.head_dim <= 128) return sm80::launch_interval_attention<Element, 128>(p, stream);
  if (p.head_dim <= 192) return sm80::launch_interval_attention<Element, 192>(p, stream);
  if (p.head_dim <= 256) return sm80::launch_interval_attention<Element, 256>(p, stream);
  return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t dispatch_head_dim(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.is_general()) return dispatch_intervals<Element>(p, stream);
  if (p.head_dim <= 64) return sm80::launch_block_attention<Element, 64>(p, stream);
  if (p.head_dim <= 96) return sm80::launch_block_attention<Element, 96>(p, stream);
  if (p.head_dim <= 128) return sm80::launch_block_attention<Element, 128>(p, stream);
  if (p.head_dim <= 192) return sm80::launch_block_attention<Element, 192>(p, stream);
  if (p.head_dim <= 256) return sm80::launch_block_attention<Element, 256>(p, stream);
  return cudaErrorInvalidValue;
}

/// Calls whose setup by the Hopper family takes longer than the work: the portable family takes 14
/// to 37 % less time there; from 128 rows on the Hopper family takes less.
bool is_short(const BlockAttentionParams& p) {
  constexpr int kRows = 64;
  return sm80::supports(p) && p.num_queries <= kRows && p.segments[0].num_keys <= kRows;
}

cudaError_t launch(const BlockAttentionParams& p, cudaStream_t stream) {
  if (sm90::supports(p) && wants_sm90(/*unless_set=*/!is_short(p))) {
    const cudaError_t error =
        sm90::available() ? sm90::block_attention(p, stream) : cudaErrorNotSupported;
    if (error != cudaErrorNotSupported || wants_sm90(/*unless_set=*/false)) return error;
  }
  if (!sm80::supports(p)) return cudaErrorNotSupported;
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

}  // namespace

bool supports_segment_lists(const AttentionShape& shape) {
  return sm90::supports(shape) && sm90::available() && wants_sm90(/*unless_set=*/true);
}

std::vector<AttentionTile> attention_tiles(DataType dtype, int head_dim) {
  AttentionShape shape;
  shape.dtype = dtype;
  shape.head_dim = head_dim;
  if (supports_segment_lists(shape)) return sm90::attention_tiles(head_dim);
  return {sm80::attention_tile(dtype, head_dim)};
}

cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.num_queries == 0 || p.num_heads == 0) return cudaSuccess;
  return launch(p, stream);
}

}  // namespace ringattn::cuda
