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

#include "transport/group/ring_group.h"

namespace ringattn {
namespace {

// What a rank tells the others of its memory.
struct Offer {
  char host[64] = {};     // which boot of which machine
  char reason[160] = {};  // why there is none; empty: there is
  cudaIpcMemHandle_t handle = {};
};

std::string to_word(const Offer& offer) {
  return {reinterpret_cast<const char*>(&offer), sizeof(offer)};
}

Offer to_offer(const std::string& word) {
  Offer offer;
  TORCH_INTERNAL_ASSERT(word.size() == sizeof(offer));
  std::memcpy(&offer, word.data(), sizeof(offer));
  return offer;
}

template <size_t kSize>
void put(char (&to)[kSize], const std::string& text) {
  text.copy(to, kSize - 1);
}

std::string host_name() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[64] = {};
  gethostname(name, sizeof(name) - 1);
  return boot.substr(0, 36) + " " + name;
}

// Sub-allocations of the driver share a mapping; whole pages of its own have none to share with.
size_t whole_pages(size_t bytes) {
  constexpr size_t kPage = size_t{2} << 20;
  return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

}  // namespace

SharedMemory::SharedMemory(RingGroup& group, c10::Device device, size_t bytes)
    : device_(device),
      rank_(group.rank()),
      bytes_(whole_pages(bytes)),
      memory_(group.size(), nullptr) {}

// What throws from here on frees what there is.
SharedMemory::SharedMemory(RingGroup& group, c10::Device device, size_t bytes, std::string refusal)
    : SharedMemory(group, device, bytes) {
  const c10::cuda::CUDAGuard guard(device);
  Offer mine;
  put(mine.host, host_name());
  cudaError_t error = cudaMalloc(&memory_[rank_], bytes_);
  if (error == cudaErrorMemoryAllocation) {  // PyTorch may hold what nobody uses
    c10::cuda::CUDACachingAllocator::emptyCache();
    error = cudaMalloc(&memory_[rank_], bytes_);
  }
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&mine.handle, memory_[rank_]);
  if (refusal.empty() && error != cudaSuccess) refusal = cudaGetErrorString(error);
  cudaGetLastError();  // a failure here is not the next caller's
  put(mine.reason, refusal);

  const auto words = group.exchange(to_word(mine));
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const Offer offer = to_offer(words[rank]);
    if (rank == rank_ || !refusal.empty() || offer.reason[0] != '\0') continue;
    if (std::strcmp(offer.host, mine.host) != 0) {
      refusal = "it does not share a host with rank " + std::to_string(rank);
      continue;
    }
    error = cudaIpcOpenMemHandle(&memory_[rank], offer.handle, cudaIpcMemLazyEnablePeerAccess);
    if (error == cudaSuccess) continue;
    cudaGetLastError();
    memory_[rank] = nullptr;
    refusal = "it cannot map the memory of rank " + std::to_string(rank) + " (" +
              cudaGetErrorString(error) + ")";
  }
  const auto refusals = group.exchange(refusal);
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    if (refusals[rank].empty()) continue;
    close_others();
    group.exchange("");  // nobody sees it any more
    TORCH_CHECK(false,
                "ringattn: ranks must be on one host and reach each other's device memory for "
                "transport \"symmetric\", got rank ",
                rank, ": ", refusals[rank]);
  }
}

SharedMemory::~SharedMemory() {
  close_others();
  on_device(device_, [&] { cudaFree(memory_[rank_]); });
}

void SharedMemory::close_others() noexcept {
  on_device(device_, [&] {
    for (int64_t rank = 0; rank < static_cast<int64_t>(memory_.size()); ++rank) {
      if (rank == rank_ || memory_[rank] == nullptr) continue;
      cudaIpcCloseMemHandle(memory_[rank]);
      memory_[rank] = nullptr;
    }
  });
}

}  // namespace ringattn
