// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace ringattn::cuda {

/// Block attention on the current device, enqueued on `stream`. Needs compute capability 8.0 and
/// aligned rows (alignment.h). The same inputs give the same bits.
cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda
