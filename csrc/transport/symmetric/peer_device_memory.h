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

struct Rendezvous;

/// For destructors: runs `body` on this device; nothing where CUDA has been shut down, at the end
/// of the process.
template <typename Body>
void on_device(c10::Device device, const Body& body) noexcept {
  try {
    // Note: this guard makes no context on the device that it restores.
    const c10::cuda::CUDAGuard guard(device);
    body();
  } catch (const std::exception&) {
    // CUDA has freed everything itself.
  }
}

/// Device memory of every rank that all ranks can read and write: CUDA IPC, between processes of
/// one host whose devices have peer access.
class PeerDeviceMemory {
 public:
  /// Collective; each rank allocates `bytes`. Where a rank's memory cannot be shared, or `refusal`
  /// of a rank is not empty, it throws on all ranks with the rank and the reason; the group goes
  /// on.
  PeerDeviceMemory(const Rendezvous& rendezvous, c10::Device device, size_t bytes,
                   std::string refusal);
  ~PeerDeviceMemory();
  PeerDeviceMemory(const PeerDeviceMemory&) = delete;
  PeerDeviceMemory& operator=(const PeerDeviceMemory&) = delete;

  size_t bytes() const { return bytes_; }
  /// The address of `rank`'s memory in this process, this rank's own included.
  void* of(int64_t rank) const { return memory_[rank]; }
  /// Unmaps the peers' memory. Memory must not be freed while a peer has it mapped.
  void close_peers() noexcept;

 private:
  PeerDeviceMemory(const Rendezvous& rendezvous, c10::Device device,
                   size_t bytes);  // nothing allocated

  c10::Device device_;
  int64_t rank_;
  size_t bytes_;
  std::vector<void*> memory_;  // [W]
};

}  // namespace ringattn
