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

struct Lanes {
  std::mutex mutex;
  std::vector<c10::cuda::CUDAStream> idle;
};

Lanes& lanes() { return process_singleton<Lanes>(); }

}  // namespace

c10::cuda::CUDAStream take_lane(c10::Device device) {
  const std::lock_guard<std::mutex> lock(lanes().mutex);
  auto& idle = lanes().idle;
  const auto found = std::find_if(idle.begin(), idle.end(), [&](const c10::cuda::CUDAStream& lane) {
    return lane.device_index() == device.index();
  });
  if (found != idle.end()) {
    const c10::cuda::CUDAStream lane = *found;
    idle.erase(found);
    return lane;
  }
  const c10::cuda::CUDAGuard guard(device);
  int lowest = 0, highest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
  return c10::cuda::getStreamFromExternal(stream, device.index());
}

void give_lane_back(c10::cuda::CUDAStream lane) {
  const std::lock_guard<std::mutex> lock(lanes().mutex);
  lanes().idle.push_back(lane);
}

}  // namespace ringattn
