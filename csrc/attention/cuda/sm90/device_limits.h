// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace ringattn::cuda::sm90 {

struct DeviceLimits {
  int multiprocessors = 0;
  int l2_bytes = 0;
};

inline cudaError_t device_limits(int device, DeviceLimits& limits) {
  // Needed in every call, and constant: each thread caches the values of its latest device.
  static thread_local int known_device = -1;
  static thread_local DeviceLimits known;
  if (device != known_device) {
    DeviceLimits asked;
    cudaError_t error =
        cudaDeviceGetAttribute(&asked.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&asked.l2_bytes, cudaDevAttrL2CacheSize, device);
    if (error != cudaSuccess) return error;
    known = asked;
    known_device = device;
  }
  limits = known;
  return cudaSuccess;
}

}  // namespace ringattn::cuda::sm90
