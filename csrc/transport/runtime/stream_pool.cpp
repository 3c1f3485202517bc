// SPDX-License-Identifier: Apache-2.0
#include "transport/runtime/stream_pool.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "core/process_singleton.h"

namespace ringattn {
namespace {

struct StreamPool {
  std::mutex mutex;
  std::vector<c10::cuda::CUDAStream> idle;
};

StreamPool& pool() { return process_singleton<StreamPool>(); }

}  // namespace

c10::cuda::CUDAStream take_stream(c10::Device device) {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  auto& idle = pool().idle;
  const auto found = std::find_if(
      idle.begin(), idle.end(),
      [&](const c10::cuda::CUDAStream& stream) { return stream.device_index() == device.index(); });
  if (found != idle.end()) {
    const c10::cuda::CUDAStream stream = *found;
    idle.erase(found);
    return stream;
  }
  const c10::cuda::CUDAGuard guard(device);
  int lowest = 0, highest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
  return c10::cuda::getStreamFromExternal(stream, device.index());
}

void return_stream(c10::cuda::CUDAStream stream) {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  pool().idle.push_back(stream);
}

}  // namespace ringattn
