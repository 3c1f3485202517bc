// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>

namespace ringattn {

struct Rendezvous;

/// Host memory that all ranks of a group and their devices can read and write, zeroed at first:
/// POSIX shared memory, between processes of one host.
class PeerHostMemory {
 public:
  /// Collective; `bytes` is the same on all ranks. Where a rank cannot map it, it throws on all
  /// ranks with the rank and the reason; the group goes on.
  PeerHostMemory(const Rendezvous& rendezvous, c10::Device device, size_t bytes);
  ~PeerHostMemory();
  PeerHostMemory(const PeerHostMemory&) = delete;
  PeerHostMemory& operator=(const PeerHostMemory&) = delete;

  /// Its address in this process.
  void* data() const { return data_; }
  /// The address at which the device sees what the host sees at `data`.
  void* on_device(const void* data) const;

 private:
  std::string map(const std::string& name, bool is_new);
  std::string map_on_device();
  void unmap() noexcept;

  c10::Device device_;
  size_t bytes_;
  char* data_ = nullptr;
  char* device_data_ = nullptr;
};

}  // namespace ringattn
