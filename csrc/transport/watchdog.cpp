// SPDX-License-Identifier: Apache-2.0
#include "transport/watchdog.h"

#include <algorithm>
#include <thread>
#include <utility>

#ifdef RINGATTN_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ringattn {
using Clock = std::chrono::steady_clock;

namespace {

// What is set up last ends first: destroyed before what was loaded earlier, torch among it.
struct StopAtExit {
  ~StopAtExit() { Watchdog::get().stop(); }
} stop_at_exit;

}  // namespace

Watchdog& Watchdog::get() {
  // Never destroyed: its thread may outlive static objects by a moment.
  static Watchdog* const watchdog = new Watchdog;
  return *watchdog;
}

void Watchdog::start() {
  if (running_ || stopping_) return;
  running_ = true;
  std::thread([this] { run(); }).detach();
}

void Watchdog::stop() {
  constexpr auto kPatience = std::chrono::seconds(5);  // freeing a communicator takes a while
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, kPatience, [&] { return !running_; });
}

void Watchdog::watch(std::unique_ptr<Watched> watched) {
  // CUDA's driver is set up by its first call, later than this library is loaded; by now it is
  // there, and so it outlives the thread too.
  static const StopAtExit stop_before_the_driver;
  const std::lock_guard<std::mutex> lock(mutex_);
#ifdef RINGATTN_WITH_CUDA
  if (device_ < 0) cudaGetDevice(&device_);
#endif
  owners_.push_back(watched->owner());
  incoming_.push_back(std::move(watched));
  start();
  // Note: the thread is not woken. It looks soon enough by itself, and waking it in every call
  // costs more than the rest of this function.
}

void Watchdog::drain(const void* owner) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_drains_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !std::count(owners_.begin(), owners_.end(), owner); });
  --num_drains_;
}

void Watchdog::every_half_second(void (*task)()) {
  const std::lock_guard<std::mutex> lock(mutex_);
  task_ = task;
  start();
  changed_.notify_all();
}

bool TimeLimited::look() {
  if (done()) return true;
  if (expired_ || !started()) return false;
  const auto now = Clock::now();
  if (start_ == Clock::time_point{}) start_ = now;
  if (now - start_ >= timeout()) {
    expired_ = true;
    expire();
  }
  return false;
}

bool Watchdog::is_over(Watched& watched) {
  try {
    return watched.look();
  } catch (const std::exception&) {
    return true;  // the device has failed: whoever uses it next is told by CUDA itself
  }
}

// Note: not before there is something to watch. A thread's first device is 0, and a context there
// is made by the first call that needs one: memory for nothing, or none at all where CUDA is not
// used.
void Watchdog::use_device() {
#ifdef RINGATTN_WITH_CUDA
  if (uses_device_ || device_ < 0) return;
  uses_device_ = true;
  cudaSetDevice(device_);
  // A capture that some other thread has begun is none of this one's business, and must survive it.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
#endif
}

void Watchdog::run() {
  constexpr auto kGlance = std::chrono::milliseconds(20);
  constexpr auto kGlanceWhileDraining = std::chrono::milliseconds(1);
  constexpr auto kHousekeeping = std::chrono::milliseconds(500);
  auto next_housekeeping = Clock::now();
  for (;;) {
    void (*task)() = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (num_drains_ == 0) {
        changed_.wait_for(lock, kGlance, [&] { return num_drains_ > 0 || stopping_; });
      } else {
        changed_.wait_for(lock, kGlanceWhileDraining);
      }
      if (stopping_) {
        running_ = false;
        changed_.notify_all();
        return;
      }
      if (!incoming_.empty()) use_device();
      watched_.splice(watched_.end(), incoming_);
      task = task_;
    }
    std::list<const void*> finished;
    for (auto watched = watched_.begin(); watched != watched_.end();) {
      if (!is_over(**watched)) {
        ++watched;
        continue;
      }
      finished.push_back((*watched)->owner());
      watched = watched_.erase(watched);
    }
    if (!finished.empty()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const void* owner : finished) {
        owners_.erase(std::find(owners_.begin(), owners_.end(), owner));
      }
      changed_.notify_all();
    }
    if (task != nullptr && Clock::now() >= next_housekeeping) {
      next_housekeeping = Clock::now() + kHousekeeping;
      task();
    }
  }
}

}  // namespace ringattn
