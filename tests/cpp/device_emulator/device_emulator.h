// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

// Runs the device code of a thread block on the host, with a host thread for each device thread.
// Threads of a warp exchange values through memory, between barriers. One thread block at a time:
// __shared__ is static.

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

namespace emulator {

constexpr int kWarpSize = 32;

/// `threads` threads wait for each other.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t round = round_;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  const int threads_;
  std::mutex mutex_;
  std::condition_variable all_;
  int arrived_ = 0;
  int64_t round_ = 0;
};

struct Warp {
  Barrier barrier{kWarpSize};
  float exchanged[kWarpSize] = {};
  uint32_t values[kWarpSize] = {};
};

struct Block {
  explicit Block(int threads) : barrier(threads), votes(threads), warps(threads / kWarpSize) {
    for (auto& warp : warps) warp = std::make_unique<Warp>();
  }
  Barrier barrier;
  std::vector<uint8_t> votes;  // by thread
  std::vector<std::unique_ptr<Warp>> warps;
};

struct Index {
  unsigned x = 0;
};

inline thread_local Index this_thread, this_block;
inline thread_local Block* block = nullptr;
inline thread_local Warp* warp = nullptr;

}  // namespace emulator

inline thread_local emulator::Index emulated_grid;

namespace emulator {

/// Runs `thread` on so many, whole warps, as thread block `number` of `blocks`.
inline void run_block(unsigned number, unsigned blocks, int num_threads,
                      const std::function<void(int)>& thread) {
  Block shared(num_threads);
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      this_thread.x = i;
      this_block.x = number;
      emulated_grid.x = blocks;
      block = &shared;
      warp = shared.warps[i / kWarpSize].get();
      thread(i);
    });
  }
  for (std::thread& each : threads) each.join();
}

/// Runs `lane` on 32 of them.
inline void run(const std::function<void(int)>& lane) { run_block(0, 1, kWarpSize, lane); }

/// Every lane's `value`, by lane.
inline std::vector<uint32_t> exchange(uint32_t value) {
  warp->values[this_thread.x % kWarpSize] = value;
  warp->barrier.wait();
  std::vector<uint32_t> all(warp->values, warp->values + kWarpSize);
  warp->barrier.wait();
  return all;
}

}  // namespace emulator

#define threadIdx emulator::this_thread
#define blockIdx emulator::this_block
#define gridDim emulated_grid  // a launch's configuration has a member of this name

using std::isinf;
using std::max;
using std::min;

inline float __fmul_rn(float a, float b) { return a * b; }

inline float __shfl_xor_sync(uint32_t, float x, int mask) {
  const int lane = static_cast<int>(threadIdx.x % emulator::kWarpSize);
  emulator::warp->exchanged[lane] = x;
  emulator::warp->barrier.wait();
  const float other = emulator::warp->exchanged[lane ^ mask];
  emulator::warp->barrier.wait();
  return other;
}

inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return emulator::exchange(x)[lane]; }

inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const std::vector<uint32_t> votes = emulator::exchange(vote);
  uint32_t all = 0;
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) all |= votes[lane] << lane;
  return all;
}

inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == mask; }

inline void __syncwarp() { emulator::warp->barrier.wait(); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

inline void __syncthreads() { emulator::block->barrier.wait(); }

inline bool __syncthreads_or(bool vote) {
  emulator::block->votes[threadIdx.x] = vote;
  emulator::block->barrier.wait();
  const auto& votes = emulator::block->votes;
  const bool any = std::find(votes.begin(), votes.end(), 1) != votes.end();
  emulator::block->barrier.wait();
  return any;
}

inline void __nanosleep(uint32_t) { std::this_thread::yield(); }
