// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/export.h"

namespace ringattn::cuda {

/// Memory of results, of any floating point type.
struct Results {
  static constexpr int kMax = 4;
  void* data[kMax] = {};
  int64_t bytes[kMax] = {};
  int count = 0;
};

/// Fills `results` with NaN if one of the flags `failed` is not 0 by the time the stream comes to
/// it. They are device memory: reading the host's here would cost a quarter of a millisecond in
/// every call.
RINGATTN_API cudaError_t fill_nan_if_failed(const Results& results, const uint32_t* failed,
                                            int num_flags, cudaStream_t stream);

}  // namespace ringattn::cuda
