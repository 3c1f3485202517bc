// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "core/attention_tile.h"

// The portable kernel family: compute capability 8.0 and later. Each launcher is instantiated in a
// file of its own (instantiations/), for Element in {__half, __nv_bfloat16, float} and the tile
// sizes of head dims.

namespace ringattn::cuda::sm80 {

/// One segment, without a `first_query`, whose keys are local; the scratch is not touched.
inline bool supports(const BlockAttentionParams& p) {
  return p.num_segments == 1 && p.segments[0].first_query == 0 && !p.segments[0].is_remote() &&
         p.fetch == Fetch::kNone;
}

constexpr AttentionTile attention_tile(DataType dtype, int head_dim) {
  if (dtype == DataType::kFloat32) {
    const int rows = head_dim <= 64 ? 128 : 64;
    return {rows, head_dim <= 192 ? 32 : 16, rows};
  }
  const int rows = head_dim <= 128 ? 128 : 64;
  return {rows, head_dim <= 64 ? 96 : head_dim <= 96 ? 80 : 64, rows};
}

/// p must be supported. kHeadDim in {64, 96, 128, 192, 256}: the smallest that holds p.head_dim.
template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// The same for general calls (params.h).
template <typename Element, int kHeadDim>
cudaError_t launch_interval_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// kHeadDim in {64, 128, 256}. With p.workspace, states [splits][B, S_q, H, D] and, behind them,
/// their lse [splits][B, H, S_q] go there. Without, the result of the only split goes to p.out,
/// float32, and p.lse. num_keys > 0, or sinks are given.
template <typename Element, int kHeadDim>
cudaError_t launch_decode_attention(const DecodeAttentionParams& p, int splits,
                                    cudaStream_t stream);

/// kHeadDim in {64, 128, 256}: the smallest that holds p.head_dim. num_keys > 0.
template <typename Element, int kHeadDim>
cudaError_t launch_block_attention_backward(const BlockAttentionBackwardParams& p,
                                            cudaStream_t stream);

}  // namespace ringattn::cuda::sm80
