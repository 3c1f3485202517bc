// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "core/export.h"

namespace ringattn::cuda {

/// Merges states on the current device, enqueued on `stream`: out = sum_i exp(lse_i - lse) * out_i
/// with lse = logsumexp_i(lse_i), summed in order; where every lse_i is -inf, out is 0 and lse
/// -inf. Any strides, any device.
RINGATTN_API cudaError_t merge_states(const MergeStatesParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda
