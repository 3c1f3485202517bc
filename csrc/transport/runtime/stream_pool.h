// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

namespace ringattn {

/// A stream of high priority for copies and rotations, that nobody else has until it is given back.
///
/// Note: none of PyTorch's pool. Two groups that came by the same one would wait for each other's
/// copies, and their kernels for them. Never destroyed: PyTorch's allocator may come back to a
/// stream when it frees what was used there.
c10::cuda::CUDAStream take_lane(c10::Device device);
/// Everything on it must be done.
void give_lane_back(c10::cuda::CUDAStream lane);

}  // namespace ringattn
