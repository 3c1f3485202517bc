// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace ringattn::cuda::sm90 {

/// The copy engine's description of x [B, rows, heads, D], to be moved in boxes of box_rows rows
/// and 128 bytes, swizzled: 64 columns of a 16-bit type, 32 of float32. Rows must be aligned
/// (alignment.h), and x must have elements. cudaErrorNotSupported where the engine cannot.
cudaError_t make_tensor_map(const Strided& x, DataType dtype, int batch, int rows, int heads,
                            int head_dim, int box_rows, CUtensorMap& map);

}  // namespace ringattn::cuda::sm90
