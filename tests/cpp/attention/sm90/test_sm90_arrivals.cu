// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <random>
#include <vector>

#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/tensor_map.h"
#include "catch.h"
#include "device.h"
#include "peer_sync/spin_wait.cuh"
#include "swizzle.h"

// A thread block reads what another one fetches while both run.

namespace {

using namespace ringattn;
using namespace ringattn::cuda;
using namespace ringattn::cuda::sm90;

constexpr int kThreads = 128;
constexpr int kRounds = 40;
constexpr int kBoxRows = 64, kBoxElements = kBoxRows * kSwizzledColumns;
constexpr int kBoxBytes = 2 * kBoxElements;
constexpr int kFetchBufferBytes = 1024, kFetchBuffers = kBoxBytes / kFetchBufferBytes;

/// Box after box through a fetch buffer in shared memory, each counted once it has arrived.
__device__ void fetch_boxes(const uint16_t* from, uint16_t* to, uint32_t* counts) {
  __shared__ __align__(128) unsigned char buffer[kFetchBufferBytes];
  __shared__ uint64_t barrier_memory;
  const uint32_t barrier = shared_address(&barrier_memory);
  init_barrier(barrier, 1);
  publish_barriers();
  for (int i = 0; i < kRounds * kFetchBuffers; ++i) {
    if (i % kFetchBuffers == 0) __nanosleep(i / kFetchBuffers % 4 * 20000);
    const int64_t at = int64_t{i} * (kFetchBufferBytes / 2);
    arrive_expecting(barrier, kFetchBufferBytes);
    load_bytes(shared_address(buffer), from + at, kFetchBufferBytes, barrier);
    wait(barrier, i % 2);
    store_bytes(to + at, shared_address(buffer), kFetchBufferBytes);
    commit_stores();
    wait_for_stores<0>();
    add_release(counts + i / kFetchBuffers, 1);
  }
}

/// The second thread block fetches. The first loads every box once, so that caches hold what was
/// there before; then each one when it has been counted whole, out of shared memory into
/// `received`.
__global__ void receive(const __grid_constant__ CUtensorMap map, const uint16_t* from,
                        uint16_t* memory, uint32_t* counts, uint16_t* received) {
  __shared__ __align__(1024) uint16_t box[kBoxElements];
  __shared__ uint64_t barrier_memory;
  if (blockIdx.x == 1) {
    if (threadIdx.x == 0) fetch_boxes(from, memory, counts);
    return;
  }
  const uint32_t barrier = shared_address(&barrier_memory);
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    publish_barriers();
  }
  __syncthreads();
  for (int load = 0; load < 2 * kRounds; ++load) {
    const int round = load % kRounds;
    if (threadIdx.x == 0) {
      if (load >= kRounds) {
        wait_for_count(counts + round, kFetchBuffers);
        fence_async_global();
      }
      arrive_expecting(barrier, kBoxBytes);
      load_box(shared_address(box), map, {0, round * kBoxRows, 0, 0}, barrier,
               L2Policy::kEvictLast);
    }
    wait(barrier, load % 2);
    for (int i = threadIdx.x; i < kBoxElements; i += kThreads) {
      received[round * kBoxElements + i] = box[i];
    }
    __syncthreads();
  }
}

}  // namespace

TEST_CASE("sm90: a box that has been counted whole is the one that was fetched") {
  if (!has_hopper()) return;
  std::vector<uint16_t> sent(kRounds * kBoxElements);
  std::mt19937 generator(1);
  for (uint16_t& bits : sent) bits = static_cast<uint16_t>(generator());
  const DeviceArray<uint16_t> source(sent), memory(std::vector<uint16_t>(sent.size(), 0x7F7F)),
      received(std::vector<uint16_t>(sent.size(), 0));
  const DeviceArray<uint32_t> counts(std::vector<uint32_t>(kRounds, 0));
  CUtensorMap map;
  REQUIRE(make_tensor_map({memory.data(), 0, kSwizzledColumns, 0}, DataType::kBFloat16, 1,
                          kRounds * kBoxRows, 1, kSwizzledColumns, kBoxRows, map) == cudaSuccess);
  receive<<<2, kThreads>>>(map, source.data(), memory.data(), counts.data(), received.data());
  REQUIRE(cudaGetLastError() == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

  const std::vector<uint16_t> boxes = received.values();
  std::vector<uint16_t> expected(sent.size());
  for (int row = 0; row < kRounds * kBoxRows; ++row)
    for (int column = 0; column < kSwizzledColumns; ++column) {
      const int box = row / kBoxRows * kBoxElements;
      expected[box + swizzled(row % kBoxRows, column)] = sent[row * kSwizzledColumns + column];
    }
  CHECK((boxes == expected));
  CHECK(counts.values() == std::vector<uint32_t>(kRounds, kFetchBuffers));
}
