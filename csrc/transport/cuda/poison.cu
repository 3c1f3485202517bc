// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda/poison.h"

namespace ringattn::cuda {
namespace {

// Every type's NaN is written bit by bit: 0x7fff is one in both half types.
template <typename Bits>
__global__ void poison(Bits* data, int64_t count, Bits nan, const int* failed) {
  // Note: volatile, because it is set while kernels of this stream are waiting.
  if (*static_cast<const volatile int*>(failed) == 0) return;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads)
    data[i] = nan;
}

}  // namespace

cudaError_t poison_if_failed(void* data, int64_t count, int bytes, const int* failed,
                             cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  constexpr int kBlocks = 32;  // it almost never has work: small, so that it costs little
  if (bytes == 4) {
    poison<<<kBlocks, kThreads, 0, stream>>>(static_cast<uint32_t*>(data), count,
                                             uint32_t{0x7fffffff}, failed);
  } else {
    poison<<<kBlocks, kThreads, 0, stream>>>(static_cast<uint16_t*>(data), count, uint16_t{0x7fff},
                                             failed);
  }
  return cudaGetLastError();
}

}  // namespace ringattn::cuda
