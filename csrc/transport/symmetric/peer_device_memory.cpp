// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/peer_device_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "core/environment.h"
#include "transport/group/rendezvous.h"

namespace ringattn {
namespace {

// What a rank publishes about its memory.
struct MemoryHandle {
  char host[256] = {};    // what it was told to be, machine and boot
  char reason[160] = {};  // why there is none; empty: `handle` is valid
  cudaIpcMemHandle_t handle = {};
};

std::string to_bytes(const MemoryHandle& handle) {
  return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

MemoryHandle from_bytes(const std::string& bytes) {
  MemoryHandle handle;
  TORCH_INTERNAL_ASSERT(bytes.size() == sizeof(handle));
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

template <size_t kSize>
void copy_text(char (&to)[kSize], const std::string& text) {
  text.copy(to, kSize - 1);
}

std::string host_name() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[64] = {};
  gethostname(name, sizeof(name) - 1);
  return boot.substr(0, 36) + " " + name + " " + environment().host_id;
}

// Small allocations of the driver share a mapping; whole pages are mapped alone.
size_t whole_pages(size_t bytes) {
  constexpr size_t kPage = size_t{2} << 20;
  return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

}  // namespace

PeerDeviceMemory::PeerDeviceMemory(const Rendezvous& rendezvous, c10::Device device, size_t bytes)
    : device_(device),
      rank_(rendezvous.rank),
      bytes_(whole_pages(bytes)),
      memory_(rendezvous.size, nullptr) {}

// The delegated constructor has ended: an exception from here on runs the destructor.
PeerDeviceMemory::PeerDeviceMemory(const Rendezvous& rendezvous, c10::Device device, size_t bytes,
                                   std::string refusal)
    : PeerDeviceMemory(rendezvous, device, bytes) {
  const c10::cuda::CUDAGuard guard(device);
  MemoryHandle mine;
  copy_text(mine.host, host_name());
  cudaError_t error = cudaMalloc(&memory_[rank_], bytes_);
  if (error == cudaErrorMemoryAllocation) {  // PyTorch's cache may hold unused memory
    c10::cuda::CUDACachingAllocator::emptyCache();
    error = cudaMalloc(&memory_[rank_], bytes_);
  }
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&mine.handle, memory_[rank_]);
  if (refusal.empty() && error != cudaSuccess) refusal = cudaGetErrorString(error);
  cudaGetLastError();  // the error is reported here, not by the next call
  copy_text(mine.reason, refusal);

  const auto published = rendezvous.exchange(to_bytes(mine));
  for (int64_t rank = 0; rank < rendezvous.size; ++rank) {
    const MemoryHandle theirs = from_bytes(published[rank]);
    if (rank == rank_ || !refusal.empty() || theirs.reason[0] != '\0') continue;
    if (std::strcmp(theirs.host, mine.host) != 0) {
      refusal = "it does not share a host with rank " + std::to_string(rank);
      continue;
    }
    error = cudaIpcOpenMemHandle(&memory_[rank], theirs.handle, cudaIpcMemLazyEnablePeerAccess);
    if (error == cudaSuccess) continue;
    cudaGetLastError();
    memory_[rank] = nullptr;
    refusal = "it cannot map the memory of rank " + std::to_string(rank) + " (" +
              cudaGetErrorString(error) + ")";
  }
  const auto refusals = rendezvous.exchange(refusal);
  for (int64_t rank = 0; rank < rendezvous.size; ++rank) {
    if (refusals[rank].empty()) continue;
    close_peers();
    rendezvous.exchange("");  // all ranks have unmapped it
    TORCH_CHECK(false,
                "ringattn: ranks must be on one host and reach each other's device memory for "
                "transport \"symmetric\", got rank ",
                rank, ": ", refusals[rank]);
  }
}

PeerDeviceMemory::~PeerDeviceMemory() {
  close_peers();
  on_device(device_, [&] { cudaFree(memory_[rank_]); });
}

void PeerDeviceMemory::close_peers() noexcept {
  on_device(device_, [&] {
    for (int64_t rank = 0; rank < static_cast<int64_t>(memory_.size()); ++rank) {
      if (rank == rank_ || memory_[rank] == nullptr) continue;
      cudaIpcCloseMemHandle(memory_[rank]);
      memory_[rank] = nullptr;
    }
  });
}

}  // namespace ringattn
