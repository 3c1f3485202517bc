// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/registers.cuh"
#include "catch.h"
#include "device.h"

// How the warps of a thread block wait for each other and share out registers. Each test delays one
// side, so that a wait that does not wait is seen.

namespace {

using namespace ringattn::cuda::sm90;

constexpr int kWarpSize = 32;
constexpr int kBuffers = 2;

/// Warp 0 hands rows of 32 numbers to warp 1 through two buffers.
__global__ void pass_through_buffers(int rounds, int writer_ns, int reader_ns, uint32_t* seen) {
  __shared__ uint64_t full_memory[kBuffers], free_memory[kBuffers];
  __shared__ uint32_t buffers[kBuffers][kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kBuffers; ++i) {
      init_barrier(shared_address(&full_memory[i]), kWarpSize);
      init_barrier(shared_address(&free_memory[i]), 1);
    }
  }
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const int buffer = round % kBuffers;
    const uint32_t parity = round / kBuffers % 2;
    const uint32_t full = shared_address(&full_memory[buffer]);
    const uint32_t free = shared_address(&free_memory[buffer]);
    if (threadIdx.x < kWarpSize) {
      wait(free, parity ^ 1);
      __nanosleep(lane * writer_ns);
      buffers[buffer][lane] = round * kWarpSize + lane;
      arrive(full);
    } else {
      wait(full, parity);
      __nanosleep(lane * reader_ns);
      seen[round * kWarpSize + lane] = buffers[buffer][lane];
      __syncwarp();
      if (lane == 0) arrive(free);
    }
  }
}

/// Warps write their number in turns.
__global__ void take_turns(int rounds, int* log) {
  constexpr int kTurnThreads = 2 * kWarpSize;  // one warp waits, another one arrives
  __shared__ int next;
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int my_turn = 1 + warp, next_turn = 1 + (warp + 1) % warps;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  if (warp == 0) named_barrier_arrive(my_turn, kTurnThreads);
  for (int round = 0; round < rounds; ++round) {
    named_barrier_wait(my_turn, kTurnThreads);
    if (threadIdx.x % kWarpSize == 0) {
      const int at = next;
      __nanosleep(500);  // another warp would read the same number meanwhile
      log[at] = warp;
      next = at + 1;
    }
    __syncwarp();
    named_barrier_arrive(next_turn, kTurnThreads);
  }
  if (warp == 0) named_barrier_wait(my_turn, kTurnThreads);  // the last arrival
}

constexpr int kRoles = 3;  // warpgroups; one gives registers back, the others take them
constexpr int kThreads = kRoles * 128;
constexpr int kLiveValues = 200;  // more than the 168 registers a thread begins with

/// What each thread of the taking warpgroups makes of its number.
__host__ __device__ uint32_t next_value(uint32_t value, uint32_t neighbour) {
  return value * 1664525u + neighbour;
}

__global__ void __launch_bounds__(kThreads, 1)
    share_out_registers(int rounds, uint32_t* results, int* took_before_release) {
  __shared__ int released;
  if (threadIdx.x == 0) released = 0;
  __syncthreads();
  if (threadIdx.x < 128) {
    __nanosleep(50000);
    *const_cast<volatile int*>(&released) = 1;
    __threadfence_block();
    release_registers<24>();
  } else {
    take_registers<240>();
    if (*const_cast<volatile int*>(&released) == 0) *took_before_release = 1;
    uint32_t x[kLiveValues];
#pragma unroll
    for (int i = 0; i < kLiveValues; ++i) x[i] = threadIdx.x + i * i;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
      for (int i = 0; i < kLiveValues; ++i) x[i] = next_value(x[i], x[(i + 1) % kLiveValues]);
    }
    uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < kLiveValues; ++i) result ^= x[i];
    results[threadIdx.x] = result;
  }
}

__global__ void elect(uint32_t* masks) {
  masks[blockIdx.x * blockDim.x + threadIdx.x] = __ballot_sync(0xffffffff, elect_one_lane());
}

}  // namespace

TEST_CASE("sm90: transaction barriers pass buffers on when they are full, and back when read") {
  if (!has_hopper()) return;
  constexpr int kRounds = 64;
  struct Delays {
    int writer_ns, reader_ns;  // of lane i, times i
  };
  for (const Delays delays : {Delays{100, 0}, Delays{0, 100}, Delays{0, 0}}) {
    CAPTURE(delays.writer_ns, delays.reader_ns);
    const DeviceArray<uint32_t> seen(std::vector<uint32_t>(kRounds * kWarpSize, ~0u));
    pass_through_buffers<<<1, 2 * kWarpSize>>>(kRounds, delays.writer_ns, delays.reader_ns,
                                               seen.data());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<uint32_t> written(kRounds * kWarpSize);
    std::iota(written.begin(), written.end(), 0);
    CHECK(seen.values() == written);
  }
}

TEST_CASE("sm90: named barriers hand a turn from warp to warp") {
  if (!has_hopper()) return;
  constexpr int kRounds = 50;
  for (int warps : {2, 3, 4}) {
    const DeviceArray<int> log(std::vector<int>(kRounds * warps, -1));
    take_turns<<<1, warps * kWarpSize>>>(kRounds, log.data());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<int> in_turn;
    for (int i = 0; i < kRounds * warps; ++i) in_turn.push_back(i % warps);
    CHECK(log.values() == in_turn);
  }
}

TEST_CASE("sm90: registers are taken when they have been given back, and hold what is put there") {
  if (!has_hopper()) return;
  constexpr int kRounds = 20;
  const DeviceArray<uint32_t> results(std::vector<uint32_t>(kThreads, 0));
  const DeviceArray<int> took_before_release(std::vector<int>{0});
  share_out_registers<<<1, kThreads>>>(kRounds, results.data(), took_before_release.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(took_before_release.values()[0] == 0);

  std::vector<uint32_t> expected(kThreads, 0);
  for (int thread = 128; thread < kThreads; ++thread) {
    std::vector<uint32_t> x(kLiveValues);
    for (int i = 0; i < kLiveValues; ++i) x[i] = thread + i * i;
    for (int round = 0; round < kRounds; ++round) {
      for (int i = 0; i < kLiveValues; ++i) x[i] = next_value(x[i], x[(i + 1) % kLiveValues]);
    }
    for (uint32_t value : x) expected[thread] ^= value;
  }
  CHECK(results.values() == expected);
}

TEST_CASE("sm90: one lane of a warp is elected, always the same") {
  if (!has_hopper()) return;
  constexpr int kBlocks = 8, kBlockThreads = 4 * kWarpSize;
  const DeviceArray<uint32_t> masks(std::vector<uint32_t>(kBlocks * kBlockThreads, 0));
  elect<<<kBlocks, kBlockThreads>>>(masks.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const std::vector<uint32_t> elected = masks.values();
  CHECK(elected[0] != 0);
  CHECK((elected[0] & (elected[0] - 1)) == 0);
  CHECK(elected == std::vector<uint32_t>(elected.size(), elected[0]));
}
