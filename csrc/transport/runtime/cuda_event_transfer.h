// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
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

/// The transfer of a message by work of `side_stream`. It holds the message's tensors until the
/// stream that it was started from waits for its end: then they may be freed there. Otherwise their
/// allocator is told that the side stream uses them, and then keeps their memory until the device
/// is done.
class HoldingTransfer : public CudaTransfer {
 public:
  HoldingTransfer(const Message& message, std::shared_ptr<at::cuda::CUDAEvent> started,
                  std::shared_ptr<at::cuda::CUDAEvent> done, c10::cuda::CUDAStream side_stream)
      : CudaTransfer(std::move(started), std::move(done), message.timed),
        held_{message.send, message.receive},
        stream_(c10::cuda::getCurrentCUDAStream()),
        side_stream_(side_stream) {}

  ~HoldingTransfer() override {
    for (const at::Tensor& x : held_) {
      if (x.defined()) x.record_stream(side_stream_);
    }
  }
  HoldingTransfer(const HoldingTransfer&) = delete;
  HoldingTransfer& operator=(const HoldingTransfer&) = delete;

  void wait() override {
    CudaTransfer::wait();
    if (c10::cuda::getCurrentCUDAStream() == stream_) held_ = {};
  }

 private:
  std::array<at::Tensor, 2> held_;
  c10::cuda::CUDAStream stream_, side_stream_;
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
