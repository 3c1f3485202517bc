// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ringattn::cuda {

/// Whether the code that the current device runs for a kernel has the instructions of
/// dependent_launch.cuh. Code compiled for an older architecture runs on a newer device too,
/// without them.
template <auto kKernel>
bool supports_dependent_launch() {
  static const bool supported = [] {
    cudaFuncAttributes attributes = {};
    return cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  }();
  return supported;
}

/// `dependent`: a programmatic dependent launch, where the kernel supports it.
template <auto kKernel, typename Params>
cudaError_t launch(const Params& params, int64_t blocks, int threads, bool dependent,
                   cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent && supports_dependent_launch<kKernel>() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

/// Multiprocessors of the current device.
inline cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

/// How many of a device's multiprocessors copy while another kernel runs beside: a quarter copies
/// nearly as fast as all of them, since memory or links are the limit.
inline int64_t num_copying_multiprocessors(int multiprocessors) {
  return multiprocessors < 4 ? 1 : multiprocessors / 4;
}

}  // namespace ringattn::cuda
