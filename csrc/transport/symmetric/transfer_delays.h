// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>

#include "testing/fault_injection.h"

namespace ringattn {

/// For tests: random delays of one-sided transfers, where they are injected.
class TransferDelays {
 public:
  explicit TransferDelays(c10::Device device) : device_(device) {}

  /// For a kernel; 0: no delays.
  uint32_t seed() { return transfer_delay_seed() ? next() : 0; }

  /// Occupies a copy engine for a random time, with copies of at most `bytes` from `from`.
  void occupy_copy_engine(const void* from, int64_t bytes, c10::cuda::CUDAStream stream) {
    if (!transfer_delay_seed()) return;
    constexpr int64_t kMaxBytes = int64_t{32} << 20;
    if (!target_.defined()) {
      target_ = at::empty({kMaxBytes}, at::TensorOptions(device_).dtype(at::kByte));
    }
    const int64_t most = std::min(kMaxBytes, bytes);
    for (uint64_t times = next() % 8; times > 0; --times) {
      C10_CUDA_CHECK(cudaMemcpyAsync(target_.mutable_data_ptr(), from, next() % most,
                                     cudaMemcpyDefault, stream));
    }
  }

 private:
  uint32_t next() {
    if (!random_) random_.emplace(*transfer_delay_seed());
    return static_cast<uint32_t>((*random_)());  // never 0
  }

  c10::Device device_;
  std::optional<std::minstd_rand> random_;
  at::Tensor target_;
};

}  // namespace ringattn
