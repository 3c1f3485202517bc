// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace ringattn::cuda {

/// Block attention on the current device, enqueued on `stream`. Needs compute capability 8.0 and
/// aligned(p). The same inputs give the same bits.
cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// Whether every row of q, k, v, out and state begins at a multiple of 16 bytes, less than 2 GiB
/// from the next, as the kernels need it; a caller with other tensors makes contiguous copies.
bool aligned(const BlockAttentionParams& p);

}  // namespace ringattn::cuda
