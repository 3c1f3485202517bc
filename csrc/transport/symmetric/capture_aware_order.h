// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

namespace ringattn {

/// Orders calls that share memory one after the other, also between streams, and within a capture.
/// Replays of a captured call are ordered by their caller.
class CallOrder {
 public:
  /// `uses_buffers`: the call reads or writes memory that the transport could free.
  void begin_on(c10::cuda::CUDAStream stream, bool uses_buffers = true) {
    capture_ = capture_of(stream);
    captured_ |= capturing() && uses_buffers;
    if (capturing()) {
      if (capture_ == last_capture_ && *last_captured_stream_ != stream) {
        captured_end_.block(stream);
      }
      return;
    }
    if (last_stream_ && *last_stream_ != stream) end_.block(stream);
    last_stream_ = stream;
  }
  /// Perhaps on another stream.
  void end_on(c10::cuda::CUDAStream stream) {
    (capturing() ? captured_end_ : end_).record(stream);
    if (!capturing()) {
      last_stream_ = stream;
      return;
    }
    last_capture_ = capture_;
    last_captured_stream_ = stream;
  }

  /// Whether the present call is being captured.
  bool capturing() const { return capture_ != 0; }
  /// Whether any call that uses buffers has been.
  bool captured() const { return captured_; }
  /// Whether any call has not been.
  bool any() const { return last_stream_.has_value(); }

  /// Waits for the end of the last call that was not captured; requires any().
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

  std::optional<c10::cuda::CUDAStream> last_stream_;  // of the last call that was not captured
  at::cuda::CUDAEvent end_;                           // its end
  unsigned long long capture_ = 0;                    // of the present call; 0: none
  unsigned long long last_capture_ = 0;               // of the last captured call
  std::optional<c10::cuda::CUDAStream> last_captured_stream_;
  at::cuda::CUDAEvent captured_end_;  // its end
  bool captured_ = false;
};

}  // namespace ringattn
