// SPDX-License-Identifier: Apache-2.0
#include "transport/runtime/fill_nan_if_failed.h"

namespace ringattn::cuda {
namespace {

// All bits set are a NaN in every floating point type that PyTorch has.
__global__ void poison(Results results, const uint32_t* failed, int num_flags) {
  // Note: volatile, because they are set while kernels of this stream are waiting.
  const volatile uint32_t* const flags = failed;
  bool has_failed = false;
  for (int i = 0; i < num_flags; ++i) has_failed |= flags[i] != 0;
  if (!has_failed) return;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int result = 0; result < results.count; ++result) {
    uint8_t* const data = static_cast<uint8_t*>(results.data[result]);
    for (int64_t i = first; i < results.bytes[result]; i += threads) data[i] = 0xff;
  }
}

}  // namespace

cudaError_t fill_nan_if_failed(const Results& results, const uint32_t* failed, int num_flags,
                               cudaStream_t stream) {
  if (results.count == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  constexpr int kBlocks = 32;  // it almost never has work: small, so that it costs little
  poison<<<kBlocks, kThreads, 0, stream>>>(results, failed, num_flags);
  return cudaGetLastError();
}

}  // namespace ringattn::cuda
