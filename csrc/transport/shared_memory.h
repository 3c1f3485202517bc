// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "core/export.h"

namespace ringattn {

class RingGroup;

/// Device memory of every rank that all others can read and write: CUDA IPC, between processes of
/// one host whose devices reach each other.
class SharedMemory {
 public:
  /// Collective; every rank asks for `bytes` of its own. Where a rank's memory cannot be shared, it
  /// throws on all ranks alike, saying whose and why, and the group works on.
  SharedMemory(RingGroup& group, c10::Device device, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  size_t bytes() const { return bytes_; }
  /// The memory of `rank`, as this process sees it; this rank's own included.
  void* of(int64_t rank) const { return memory_[rank]; }
  /// Whether two ranks have the same device: then copies between them may need its multiprocessors.
  bool shares_devices() const { return shares_devices_; }

 private:
  void release() noexcept;

  c10::Device device_;
  int64_t rank_;
  size_t bytes_;
  std::vector<void*> memory_;  // [W]
  bool shares_devices_ = false;
};

}  // namespace ringattn
