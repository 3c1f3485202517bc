// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "core/export.h"

namespace ringattn::cuda {

/// delta of BlockAttentionBackwardParams, on the current device, enqueued on `stream`.
RINGATTN_API cudaError_t attention_delta(const AttentionDeltaParams& p, cudaStream_t stream);

/// The backward of block attention on the current device, enqueued on `stream`. Needs compute
/// capability 8.0 and aligned rows (alignment.h), those of dq, dk and dv too. Without queries dk
/// and dv become 0; without keys nothing is launched.
///
/// What a row or a key may be NaN without a trace elsewhere: keys that no row sees, rows that see
/// no key of a tile of keys or whose lse is -inf. A NaN of other rows and keys reaches the
/// gradients of what sees it, and may reach those of its neighbours in a tile, less than 64 away.
RINGATTN_API cudaError_t block_attention_backward(const BlockAttentionBackwardParams& p,
                                                  cudaStream_t stream);

}  // namespace ringattn::cuda
