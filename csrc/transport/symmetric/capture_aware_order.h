// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

namespace ringattn {

/// Calls that share memory follow each other, also from stream to stream, and within a capture.
/// What has been captured is ordered by whoever replays it.
class CallOrder {
 public:
  void begin_on(c10::cuda::CUDAStream stream) {
    capture_ = capture_of(stream);
    captured_ |= capturing();
    if (capturing()) {
      if (capture_ == last_capture_) captured_end_.block(stream);
      return;
    }
    if (last_stream_ && *last_stream_ != stream) end_.block(stream);
    last_stream_ = stream;
  }
  void end_on(c10::cuda::CUDAStream stream) {
    (capturing() ? captured_end_ : end_).record(stream);
    if (capturing()) last_capture_ = capture_;
  }

  /// Whether the call that has begun is being captured.
  bool capturing() const { return capture_ != 0; }
  /// Whether some call was.
  bool captured() const { return captured_; }
  /// Whether some call was not.
  bool any() const { return last_stream_.has_value(); }

  /// The end of the last call that was not captured; if there was any().
  void synchronize() { end_.synchronize(); }
  bool done() { return end_.query(); }

 private:
  /// 0: none.
  static unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
    return status == cudaStreamCaptureStatusNone ? 0 : capture;
  }

  std::optional<c10::cuda::CUDAStream> last_stream_;  // of the last call that was not captured,
  at::cuda::CUDAEvent end_;                           // and its end there
  unsigned long long capture_ = 0;       // that the call is part of which is being made; 0: none
  unsigned long long last_capture_ = 0;  // that the last captured call was part of,
  at::cuda::CUDAEvent captured_end_;     // and its end there
  bool captured_ = false;
};

}  // namespace ringattn
