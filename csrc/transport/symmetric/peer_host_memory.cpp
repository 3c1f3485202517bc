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

#include "transport/group/ring_group.h"
#include "transport/symmetric/peer_device_memory.h"

namespace ringattn {
namespace {

constexpr int64_t kMaker = 0;  // the rank that makes it

std::string new_name() {
  static std::atomic<int> made{0};
  return "/ringattn-" + std::to_string(getpid()) + "-" + std::to_string(made++) + "-" +
         std::to_string(std::random_device()());
}

std::string because(const std::string& what, const char* why) { return what + " (" + why + ")"; }

}  // namespace

SharedHostMemory::SharedHostMemory(RingGroup& group, c10::Device device, size_t bytes)
    : device_(device), bytes_(bytes) {
  const c10::cuda::CUDAGuard guard(device);
  const bool makes_it = group.rank() == kMaker;
  const std::string made = makes_it ? new_name() : "";
  std::string refusal;
  std::string name;
  try {
    if (makes_it) refusal = map(made, /*is_new=*/true);
    name = group.exchange(refusal.empty() ? made : "")[kMaker];
    if (!makes_it && !name.empty()) refusal = map(name, /*is_new=*/false);
    if (data_ != nullptr) refusal = show_device();
    const std::vector<std::string> refusals = group.exchange(refusal);
    for (int64_t rank = 0; rank < group.size(); ++rank) {
      TORCH_CHECK(refusals[rank].empty(),
                  "ringattn: ranks must share host memory for transport \"symmetric\", got rank ",
                  rank, ": ", refusals[rank]);
    }
  } catch (...) {
    if (makes_it) shm_unlink(made.c_str());
    unmap();
    throw;
  }
  if (makes_it) shm_unlink(made.c_str());  // it lives as long as it is mapped
}

SharedHostMemory::~SharedHostMemory() { unmap(); }

void* SharedHostMemory::on_device(const void* data) const {
  return device_data_ + (static_cast<const char*>(data) - data_);
}

// Why it cannot, or nothing.
std::string SharedHostMemory::map(const std::string& name, bool is_new) {
  const int file = shm_open(name.c_str(), is_new ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
  if (file < 0) return because("it cannot open /dev/shm" + name, std::strerror(errno));
  // Note: not ftruncate, after which a full file system is found out by a signal.
  int error = 0;
  do {
    error = is_new ? posix_fallocate(file, 0, static_cast<off_t>(bytes_)) : 0;
  } while (error == EINTR);
  void* mapped = MAP_FAILED;
  if (error == 0) mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int why = error != 0 ? error : errno;
  close(file);
  if (mapped == MAP_FAILED) return because("it cannot map /dev/shm" + name, std::strerror(why));
  data_ = static_cast<char*>(mapped);
  return "";
}

// The same.
std::string SharedHostMemory::show_device() {
  void* shown = nullptr;
  cudaError_t error =
      cudaHostRegister(data_, bytes_, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error == cudaSuccess) {
    error = cudaHostGetDevicePointer(&shown, data_, 0);
    if (error != cudaSuccess) cudaHostUnregister(data_);
  }
  device_data_ = static_cast<char*>(shown);
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // it is not the next caller's
  return because("its device cannot reach shared host memory", cudaGetErrorString(error));
}

void SharedHostMemory::unmap() noexcept {
  if (data_ == nullptr) return;
  if (device_data_ != nullptr) ringattn::on_device(device_, [&] { cudaHostUnregister(data_); });
  munmap(data_, bytes_);
  data_ = nullptr;
}

}  // namespace ringattn
