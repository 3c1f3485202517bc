// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

namespace ringattn {

/// A stream of high priority for copies and rotations, with one owner until it is returned.
/// Thread-safe.
///
/// Note: not a stream of PyTorch's pool. Two groups with the same stream would wait for each
/// other's copies, and their kernels too. Streams are never destroyed: PyTorch's allocator uses a
/// stream again when it frees memory that was used there.
c10::cuda::CUDAStream take_stream(c10::Device device);
/// Everything on `stream` must be done.
void return_stream(c10::cuda::CUDAStream stream);

}  // namespace ringattn
