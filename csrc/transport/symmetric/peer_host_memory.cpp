// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/peer_host_memory.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "transport/group/rendezvous.h"
#include "transport/symmetric/peer_device_memory.h"

namespace ringattn {
namespace {

constexpr int64_t kCreator = 0;  // the rank that creates it

std::string new_name() {
  static std::atomic<int> made{0};
  return "/ringattn-" + std::to_string(getpid()) + "-" + std::to_string(made++) + "-" +
         std::to_string(std::random_device()());
}

std::string with_reason(const std::string& what, const char* reason) {
  return what + " (" + reason + ")";
}

}  // namespace

PeerHostMemory::PeerHostMemory(const Rendezvous& rendezvous, c10::Device device, size_t bytes)
    : device_(device), bytes_(bytes) {
  const c10::cuda::CUDAGuard guard(device);
  const bool creates_it = rendezvous.rank == kCreator;
  const std::string made = creates_it ? new_name() : "";
  std::string refusal;
  std::string name;
  try {
    if (creates_it) refusal = map(made, /*is_new=*/true);
    name = rendezvous.exchange(refusal.empty() ? made : "")[kCreator];
    if (!creates_it && !name.empty()) refusal = map(name, /*is_new=*/false);
    if (data_ != nullptr) refusal = map_on_device();
    const std::vector<std::string> refusals = rendezvous.exchange(refusal);
    for (int64_t rank = 0; rank < rendezvous.size; ++rank) {
      TORCH_CHECK(refusals[rank].empty(),
                  "ringattn: ranks must share host memory for transport \"symmetric\", got rank ",
                  rank, ": ", refusals[rank]);
    }
  } catch (...) {
    if (creates_it) shm_unlink(made.c_str());
    unmap();
    throw;
  }
  if (creates_it) shm_unlink(made.c_str());  // it exists for as long as it is mapped
}

PeerHostMemory::~PeerHostMemory() { unmap(); }

void* PeerHostMemory::on_device(const void* data) const {
  return device_data_ + (static_cast<const char*>(data) - data_);
}

// Returns why it cannot map it; empty: it has.
std::string PeerHostMemory::map(const std::string& name, bool is_new) {
  const int file = shm_open(name.c_str(), is_new ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
  if (file < 0) return with_reason("it cannot open /dev/shm" + name, std::strerror(errno));
  // Note: not ftruncate, after which a full file system raises SIGBUS at the first access.
  int error = 0;
  do {
    error = is_new ? posix_fallocate(file, 0, static_cast<off_t>(bytes_)) : 0;
  } while (error == EINTR);
  void* mapped = MAP_FAILED;
  if (error == 0) mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int reason = error != 0 ? error : errno;
  close(file);
  if (mapped == MAP_FAILED)
    return with_reason("it cannot map /dev/shm" + name, std::strerror(reason));
  data_ = static_cast<char*>(mapped);
  return "";
}

// As map().
std::string PeerHostMemory::map_on_device() {
  void* mapped = nullptr;
  cudaError_t error =
      cudaHostRegister(data_, bytes_, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error == cudaSuccess) {
    error = cudaHostGetDevicePointer(&mapped, data_, 0);
    if (error != cudaSuccess) cudaHostUnregister(data_);
  }
  device_data_ = static_cast<char*>(mapped);
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // the error is reported here, not by the next call
  return with_reason("its device cannot reach shared host memory", cudaGetErrorString(error));
}

void PeerHostMemory::unmap() noexcept {
  if (data_ == nullptr) return;
  if (device_data_ != nullptr) ringattn::on_device(device_, [&] { cudaHostUnregister(data_); });
  munmap(data_, bytes_);
  data_ = nullptr;
}

}  // namespace ringattn
