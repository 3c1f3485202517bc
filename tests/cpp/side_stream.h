// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>

#include "catch.h"

namespace ringattn::testing {

/// How what waits comes to its end: what it waits for comes, or the host gives up, in a word of the
/// device's or in one of its own.
enum class Ends { kByItself, kFailed, kGivenUp };

/// What others do while the default stream runs a kernel.
class Meanwhile {
 public:
  Meanwhile() {
    REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~Meanwhile() { cudaStreamDestroy(stream_); }
  Meanwhile(const Meanwhile&) = delete;
  Meanwhile& operator=(const Meanwhile&) = delete;

  bool ends_soon() const {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return cudaStreamQuery(nullptr) != cudaErrorNotReady;
  }
  int read(const at::Tensor& word) const {
    int value = 0;
    copy(&value, word.data_ptr());
    return value;
  }
  void write(const at::Tensor& word, int value) const { copy(word.data_ptr(), &value); }
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
