// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

// Device code of one warp on the host: a thread for each lane. What lanes exchange goes through
// memory, between barriers.

#define __device__
#define __forceinline__ inline

namespace lanes {

constexpr int kLanes = 32;

/// All lanes wait for each other.
class Barrier {
 public:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t round = round_;
    if (++come_ == kLanes) {
      come_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int come_ = 0;
  int64_t round_ = 0;
};

struct Index {
  unsigned x = 0;
};

inline thread_local Index this_lane;
inline Barrier barrier;
inline float exchanged[kLanes];
inline bool votes[kLanes];

/// Runs `lane` on 32 of them.
inline void run(const std::function<void(int)>& lane) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kLanes; ++i) {
    threads.emplace_back([&, i] {
      this_lane.x = i;
      lane(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lanes

#define threadIdx lanes::this_lane

using std::isinf;
using std::min;

inline float __fmul_rn(float a, float b) { return a * b; }

inline float __shfl_xor_sync(uint32_t, float x, int mask) {
  const int lane = static_cast<int>(threadIdx.x);
  lanes::exchanged[lane] = x;
  lanes::barrier.wait();
  const float other = lanes::exchanged[lane ^ mask];
  lanes::barrier.wait();
  return other;
}

inline uint32_t __ballot_sync(uint32_t, bool vote) {
  lanes::votes[threadIdx.x] = vote;
  lanes::barrier.wait();
  uint32_t all = 0;
  for (int lane = 0; lane < lanes::kLanes; ++lane) all |= uint32_t{lanes::votes[lane]} << lane;
  lanes::barrier.wait();
  return all;
}

inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
