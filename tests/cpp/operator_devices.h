// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <vector>

/// Where a case of an operator runs: on the CPU in float64 and, where there is one, on a CUDA
/// device in float32.
inline std::vector<at::TensorOptions> devices() {
  std::vector<at::TensorOptions> devices = {at::TensorOptions(at::kCPU).dtype(at::kDouble)};
#ifdef RINGATTN_WITH_CUDA
  if (at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0) {
    devices.push_back(at::TensorOptions(at::kCUDA).dtype(at::kFloat));
  }
#endif
  return devices;
}
