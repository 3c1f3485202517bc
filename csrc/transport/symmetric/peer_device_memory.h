// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "core/export.h"

namespace ringattn {

class RingGroup;

/// For destructors: `body` on this device, or nothing where CUDA is gone, at the end of the
/// process.
template <typename Body>
void on_device(c10::Device device, const Body& body) noexcept {
  try {
    // Note: this one does not make a context on the device that it comes back to.
    const c10::cuda::CUDAGuard guard(device);
    body();
  } catch (const std::exception&) {
    // CUDA has taken everything with it.
  }
}

/// Device memory of every rank that all others can read and write: CUDA IPC, between processes of
/// one host whose devices reach each other.
class SharedMemory {
 public:
  /// Collective; every rank asks for `bytes` of its own. Where a rank's memory cannot be shared, or
  /// it has a reason of its own not to, it throws on all ranks alike, saying whose and why, and the
  /// group works on.
  SharedMemory(RingGroup& group, c10::Device device, size_t bytes, std::string refusal);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  size_t bytes() const { return bytes_; }
  /// The memory of `rank`, as this process sees it; this rank's own included.
  void* of(int64_t rank) const { return memory_[rank]; }
  /// This process does not see the others' memory any more. Memory must not be freed while others
  /// see it.
  void close_others() noexcept;

 private:
  SharedMemory(RingGroup& group, c10::Device device, size_t bytes);  // of nobody yet

  c10::Device device_;
  int64_t rank_;
  size_t bytes_;
  std::vector<void*> memory_;  // [W]
};

}  // namespace ringattn
