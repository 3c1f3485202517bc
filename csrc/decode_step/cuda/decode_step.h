// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "core/export.h"
#include "decode_step/params.h"

namespace ringattn::cuda {

/// Each is one launch on the current device, enqueued on `stream`. Pointers are aligned to 16
/// bytes.
RINGATTN_API cudaError_t add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream);
RINGATTN_API cudaError_t gated_silu(const GatedSiluParams& p, cudaStream_t stream);
RINGATTN_API cudaError_t rotate_into_cache(const RotateIntoCacheParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda
