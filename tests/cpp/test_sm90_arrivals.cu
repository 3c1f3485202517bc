// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/system_memory.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/tensor_map.h"
#include "catch.h"
#include "device.h"
#include "swizzle.h"

// A running kernel reads what copies bring on another stream, each of them announced by a word.

namespace {

using namespace ringattn;
using namespace ringattn::cuda::sm90;

constexpr int kThreads = 128;
constexpr int kRounds = 40;
constexpr int kBoxRows = 64, kBoxElements = kBoxRows * kSwizzledColumns;
constexpr int kBoxBytes = 2 * kBoxElements;

/// Loads every box once, so that caches hold what was there before; then each one when its word has
/// come, out of shared memory into `received`.
__global__ void receive(const __grid_constant__ CUtensorMap map, const uint32_t* words,
                        uint16_t* received, uint32_t* received_words) {
  __shared__ __align__(1024) uint16_t box[kBoxElements];
  __shared__ uint64_t barrier_memory;
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
        wait_for_arrival(words + round);
        fence_async_global();
        received_words[round] = load_relaxed_system(words + round);
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

/// Memory that copies can come from while the host goes on.
template <typename T>
class PinnedArray {
 public:
  explicit PinnedArray(const std::vector<T>& values) {
    REQUIRE(cudaMallocHost(&data_, values.size() * sizeof(T)) == cudaSuccess);
    std::memcpy(data_, values.data(), values.size() * sizeof(T));
  }
  ~PinnedArray() { cudaFreeHost(data_); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;
  const T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace

TEST_CASE("sm90: a box loaded after its word has come is the one that was sent before the word") {
  if (!has_hopper()) return;
  std::vector<uint16_t> sent(kRounds * kBoxElements);
  std::mt19937 generator(1);
  for (uint16_t& bits : sent) bits = static_cast<uint16_t>(generator());
  std::vector<uint32_t> sent_words(kRounds);
  for (int round = 0; round < kRounds; ++round) sent_words[round] = 100 + round;
  const PinnedArray<uint16_t> source(sent);
  const PinnedArray<uint32_t> source_words(sent_words);

  const DeviceArray<uint16_t> memory(std::vector<uint16_t>(sent.size(), 0x7F7F)),
      received(std::vector<uint16_t>(sent.size(), 0));
  const DeviceArray<uint32_t> words(std::vector<uint32_t>(kRounds, 0)),
      received_words(std::vector<uint32_t>(kRounds, 0));
  CUtensorMap map;
  REQUIRE(make_tensor_map({memory.data(), 0, kSwizzledColumns, 0}, DataType::kBFloat16, 1,
                          kRounds * kBoxRows, 1, kSwizzledColumns, kBoxRows, map) == cudaSuccess);
  cudaStream_t compute, copies;
  REQUIRE(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking) == cudaSuccess);
  // A first copy may wait for what a running kernel never gives: it goes ahead.
  REQUIRE(cudaMemcpyAsync(received.data(), source.data(), kBoxBytes, cudaMemcpyHostToDevice,
                          copies) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(copies) == cudaSuccess);

  receive<<<1, kThreads, 0, compute>>>(map, words.data(), received.data(), received_words.data());
  CHECK(cudaGetLastError() == cudaSuccess);
  for (int round = 0; round < kRounds; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round % 4 * 50));
    CHECK(cudaMemcpyAsync(memory.data() + round * kBoxElements,
                          source.data() + round * kBoxElements, kBoxBytes, cudaMemcpyHostToDevice,
                          copies) == cudaSuccess);
    CHECK(cudaMemcpyAsync(words.data() + round, source_words.data() + round, sizeof(uint32_t),
                          cudaMemcpyHostToDevice, copies) == cudaSuccess);
  }
  REQUIRE(cudaStreamSynchronize(copies) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(compute) == cudaSuccess);
  cudaStreamDestroy(compute);
  cudaStreamDestroy(copies);

  const std::vector<uint16_t> boxes = received.values();
  std::vector<uint16_t> expected(sent.size());
  for (int row = 0; row < kRounds * kBoxRows; ++row)
    for (int column = 0; column < kSwizzledColumns; ++column) {
      const int box = row / kBoxRows * kBoxElements;
      expected[box + swizzled(row % kBoxRows, column)] = sent[row * kSwizzledColumns + column];
    }
  CHECK((boxes == expected));
  CHECK(received_words.values() == sent_words);
}
