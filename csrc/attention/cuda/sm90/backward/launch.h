// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

// The backward for compute capability 9.0 (Hopper): float16 and bfloat16. Kernels are instantiated
// in files of their own (instantiations/).

namespace ringattn::cuda::sm90 {

/// Without a softcap scales are 0, or this large at least, and its reciprocal at most: lse is
/// divided by them, in float32.
constexpr float kSmallestScale = 0x1p-100f;

/// Whether this family has a kernel for it: 16-bit types, D up to 256 (128 in deterministic calls),
/// a scale in range, groups of heads undivided, rows that the copy engine can move; and there is
/// something to compute.
bool supports_backward(const BlockAttentionBackwardParams& p);

/// Whether p, without semaphores, is faster with one, where nothing else runs on the device.
bool gains_by_semaphore(const BlockAttentionBackwardParams& p);

/// Enqueues p, which must be supported, on an available device (available()).
/// cudaErrorNotSupported, with nothing enqueued, where the tensors have no tensor map, the device
/// has no room for the clusters that D above 128 needs, or the thread blocks of a deterministic
/// call do not fit it at one time.
cudaError_t block_attention_backward(const BlockAttentionBackwardParams& p, cudaStream_t stream);

/// kHeadDim in {64, 128, 256}: the smallest that holds p.head_dim.
template <typename Element, int kHeadDim>
cudaError_t launch_block_attention_backward(const BlockAttentionBackwardParams& p,
                                            cudaStream_t stream);

}  // namespace ringattn::cuda::sm90
