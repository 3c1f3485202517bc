// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

// The kernel family for compute capability 9.0 (Hopper): float16 and bfloat16. Kernels are
// instantiated in files of their own (instantiations/).

namespace ringattn::cuda::sm90 {

/// Of one launch: those of a ring whose blocks it fetches, one of each rank.
constexpr int kMaxSegments = 16;
static_assert(kMaxSegments >= PeerSignals::kMaxPeers);

/// Whether the current device is of compute capability 9.0: code for sm_90a runs nowhere else.
bool available();

/// Whether this family has a kernel for it: 16-bit types.
bool supports(const AttentionShape& shape);

/// Enqueues p, which must be aligned and supported, of at most kMaxSegments segments, on an
/// available device. cudaErrorNotSupported, with nothing enqueued, where the tensors have no tensor
/// map.
cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// kHeadDim in {64, 128, 256}: the smallest that holds p.head_dim.
template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// The same, where p.is_general().
template <typename Element, int kHeadDim>
cudaError_t launch_general_block_attention(const BlockAttentionParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda::sm90
