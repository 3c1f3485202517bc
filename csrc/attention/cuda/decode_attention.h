// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "core/export.h"

namespace ringattn::cuda {

/// Attention of few queries over many keys on the current device, enqueued on `stream`. Needs
/// compute capability 8.0 and aligned rows (alignment.h), out and workspace included. The same
/// inputs on the same kind of device give the same bits.
RINGATTN_API cudaError_t decode_attention(const DecodeAttentionParams& p, cudaStream_t stream);

/// Floats of p.workspace for a device of num_sms multiprocessors; 0 when none is needed.
RINGATTN_API int64_t decode_workspace_floats(const DecodeAttentionParams& p, int num_sms);

}  // namespace ringattn::cuda
