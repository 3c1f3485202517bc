// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "device_emulator.h"

// In place of CUDA's runtime where a test emulates device code: as much of it as that code calls.

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
using cudaStream_t = void*;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
struct dim3 {
  unsigned x;
  dim3(unsigned x = 1) : x(x) {}
};
struct cudaFuncAttributes {
  int ptxVersion;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace emulator {
inline int multiprocessors = 4;
inline std::mt19937 block_order;
/// Thread blocks run at the same time, for kernels that wait for a launch of another host thread.
/// They must not use __shared__, which is static.
inline bool blocks_together = false;
}  // namespace emulator

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulator::multiprocessors;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

/// Thread block after thread block, in any order: none waits for another one. Or all at once.
template <typename Parameter, typename Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameter),
                               const Argument& argument) {
  std::vector<unsigned> blocks(config->gridDim.x);
  std::iota(blocks.begin(), blocks.end(), 0);
  const auto run = [&](unsigned block) {
    emulator::run_block(block, config->gridDim.x, static_cast<int>(config->blockDim.x),
                        [&](int) { kernel(argument); });
  };
  if (emulator::blocks_together) {
    std::vector<std::thread> running;
    for (const unsigned block : blocks) running.emplace_back(run, block);
    for (std::thread& block : running) block.join();
    return cudaSuccess;
  }
  std::shuffle(blocks.begin(), blocks.end(), emulator::block_order);
  for (const unsigned block : blocks) run(block);
  return cudaSuccess;
}
