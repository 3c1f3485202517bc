// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>

namespace ringattn {

class RingGroup;

/// Host memory that all ranks of a group and their devices can read and write, 0 to begin with:
/// POSIX shared memory, between processes of one host.
class SharedHostMemory {
 public:
  /// Collective; all ranks ask for as many bytes. Where a rank cannot have it, it throws on all
  /// ranks alike, saying which and why, and the group works on.
  SharedHostMemory(RingGroup& group, c10::Device device, size_t bytes);
  ~SharedHostMemory();
  SharedHostMemory(const SharedHostMemory&) = delete;
  SharedHostMemory& operator=(const SharedHostMemory&) = delete;

  /// As this process sees it.
  void* data() const { return data_; }
  /// As its device does: where what lies at `data` lies.
  void* on_device(const void* data) const;

 private:
  std::string map(const std::string& name, bool is_new);
  std::string show_device();
  void unmap() noexcept;

  c10::Device device_;
  size_t bytes_;
  char* data_ = nullptr;
  char* device_data_ = nullptr;
};

}  // namespace ringattn
