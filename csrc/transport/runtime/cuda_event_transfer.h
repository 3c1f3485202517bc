// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transport/p2p_transport.h"
#include "transport/runtime/fill_nan_if_failed.h"

// What transports that move data on CUDA streams of their own have in common.

namespace ringattn {

inline std::shared_ptr<at::cuda::CUDAEvent> new_event(bool timed) {
  return std::make_shared<at::cuda::CUDAEvent>(timed ? cudaEventDefault : cudaEventDisableTiming);
}

/// A transfer between two events.
class CudaTransfer : public Transfer {
 public:
  CudaTransfer(std::shared_ptr<at::cuda::CUDAEvent> started,
               std::shared_ptr<at::cuda::CUDAEvent> done, bool timed)
      : started_(std::move(started)), done_(std::move(done)), timed_(timed) {}

  void wait() override { done_->block(c10::cuda::getCurrentCUDAStream()); }
  void finish() override {}
  double elapsed_ms() override { return timed_ ? started_->elapsed_time(*done_) : 0.0; }

 private:
  std::shared_ptr<at::cuda::CUDAEvent> started_, done_;
  bool timed_;
};

/// Fills `results` with NaN if one of the flags `failed`, on their device, is not 0 by the time the
/// current stream comes to it.
inline void fill_nan_if_failed(const std::vector<at::Tensor>& results, const uint32_t* failed,
                               int num_flags) {
  cuda::Results memory;
  for (const at::Tensor& result : results) {
    if (result.numel() == 0) continue;
    TORCH_INTERNAL_ASSERT(memory.count < cuda::Results::kMax);
    memory.data[memory.count] = result.mutable_data_ptr();
    memory.bytes[memory.count++] = static_cast<int64_t>(result.nbytes());
  }
  C10_CUDA_CHECK(cuda::fill_nan_if_failed(memory, failed, num_flags,
                                          c10::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace ringattn
