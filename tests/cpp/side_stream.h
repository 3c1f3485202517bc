// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>

#include "catch.h"

namespace ringattn::testing {

/// How a waiting kernel ends: by the signal that it waits for, or after a failure that the host
/// writes to device memory (`failed`) or to its own (`given_up`).
enum class Ends { kByItself, kFailed, kGivenUp };

/// Copies on a second stream while the default stream runs a kernel.
class SideStream {
 public:
  SideStream() {
    REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~SideStream() { cudaStreamDestroy(stream_); }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  bool ends_soon() const {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return cudaStreamQuery(nullptr) != cudaErrorNotReady;
  }
  int read(const at::Tensor& signal) const {
    int value = 0;
    copy(&value, signal.data_ptr());
    return value;
  }
  void write(const at::Tensor& signal, int value) const { copy(signal.data_ptr(), &value); }
  void copy(const at::Tensor& to, const at::Tensor& from) const {
    copy(to.data_ptr(), from.data_ptr(), from.nbytes());
  }

 private:
  void copy(void* to, const void* from, size_t bytes = sizeof(int)) const {
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream_) == cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace ringattn::testing
