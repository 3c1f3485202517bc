// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "core/export.h"

namespace ringattn::cuda {

/// delta and the zeros of dq of BlockAttentionBackwardParams, on the current device, enqueued on
/// `stream`.
RINGATTN_API cudaError_t attention_delta(const AttentionDeltaParams& p, cudaStream_t stream);

/// Whether p, without a table and not deterministic, is faster with a semaphore than without, where
/// nothing else runs on the current device.
RINGATTN_API bool gains_by_semaphore(const BlockAttentionBackwardParams& p);

/// How many parts of a group (BlockAttentionBackwardParams::group_parts) make p fastest on the
/// current device. Others than 1 are for the portable kernels alone.
RINGATTN_API int choose_group_parts(const BlockAttentionBackwardParams& p);

/// The backward of block attention on the current device, enqueued on `stream`. Needs compute
/// capability 8.0 and aligned rows (alignment.h), those of dq, dk and dv too. Without queries dk
/// and dv become 0; without keys nothing is launched.
///
/// Keys that no row sees may be NaN, and so may rows whose lse is -inf and rows before the first or
/// behind the last that sees a key. A NaN elsewhere reaches the gradients of what sees it, and may
/// reach those of its neighbours, less than 128 rows or keys away.
RINGATTN_API cudaError_t block_attention_backward(const BlockAttentionBackwardParams& p,
                                                  cudaStream_t stream);

}  // namespace ringattn::cuda
