// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ringattn::cuda {

/// Whether the code that the device has been given for a kernel waits for the kernel before it
/// (peer_sync/dependent_launch.cuh). What was compiled for an older one runs on a newer one too,
/// but does not.
template <auto kKernel>
bool can_be_early() {
  static const bool can = [] {
    cudaFuncAttributes attributes = {};
    return cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  }();
  return can;
}

/// `early`: set up while the kernel before it ends, where it can be.
template <auto kKernel, typename Params>
cudaError_t launch(const Params& params, int64_t blocks, int threads, bool early,
                   cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && can_be_early<kKernel>() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

/// Of the current device.
inline cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

/// How many of so many multiprocessors copy where something is to run beside them: a quarter copies
/// nearly as fast as all of them, since memory or links are the limit.
inline int64_t beside_others(int multiprocessors) {
  return multiprocessors < 4 ? 1 : multiprocessors / 4;
}

}  // namespace ringattn::cuda
