// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"
#include "core/export.h"

namespace ringattn::cuda {

/// Contiguous float32 [planes, rows, row_elements] plus parts of its rows.
struct SumRowsParams {
  static constexpr int kMaxParts = 16;
  struct Part {  // of rows [begin, end): [planes, end - begin, row_elements]
    const float* data = nullptr;
    int64_t next_plane = 0;  // elements
    int32_t begin = 0;
    int32_t end = 0;
  };

  const float* sum = nullptr;
  void* out[2] = {};  // [planes / 2, rows, row_elements], each a half of the planes; may be `sum`'s
  DataType out_dtype = DataType::kFloat32;
  Part parts[kMaxParts];
  int32_t num_parts = 0;
  int32_t planes = 0;
  int32_t rows = 0;
  int32_t row_elements = 0;  // a multiple of 4; addresses are aligned to four elements
};

/// out = sum + parts, in this order, rounded once; enqueued on `stream`. Any device.
RINGATTN_API cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream);

}  // namespace ringattn::cuda
