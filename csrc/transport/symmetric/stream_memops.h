// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/export.h"

namespace ringattn::cuda {

/// Stream memory operations: waits for and writes of 32-bit signals in the order of a stream,
/// performed by the device's front end, without a multiprocessor or a host thread. A write makes
/// what the stream did before it visible first.
///
/// Operations are collected and handed to the stream in one call.
class RINGATTN_API StreamMemOps {
 public:
  /// Whether the driver has such operations.
  static bool available();

  void wait_until(const uint32_t* signal, uint32_t value);  // until *signal equals value
  void write(uint32_t* signal, uint32_t value);
  /// Appends everything collected to the stream, in order. May be called again.
  cudaError_t enqueue(cudaStream_t stream);

 private:
  std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace ringattn::cuda
