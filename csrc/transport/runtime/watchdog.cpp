// SPDX-License-Identifier: Apache-2.0
#include "transport/runtime/watchdog.h"

#include <algorithm>
#include <thread>
#include <utility>

#ifdef RINGATTN_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ringattn {
using Clock = std::chrono::steady_clock;

namespace {

// Destroyed before static objects of libraries that were loaded earlier, torch's among them.
struct StopAtExit {
  ~StopAtExit() { Watchdog::get().stop(); }
} stop_at_exit;

}  // namespace

Watchdog& Watchdog::get() { return process_singleton<Watchdog>(); }

void Watchdog::begin_thread(void (Watchdog::*body)()) {
  ++running_;
  std::thread([this, body] {
    (this->*body)();
    const std::lock_guard<std::mutex> lock(mutex_);
    --running_;
    changed_.notify_all();
  }).detach();
}

void Watchdog::start() {
  if (started_ || stopping_) return;
  started_ = true;
  begin_thread(&Watchdog::monitor_loop);
  begin_thread(&Watchdog::reaper_loop);
}

void Watchdog::stop() {
  constexpr auto kPatience = std::chrono::seconds(5);  // freeing a communicator takes a while
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, kPatience, [&] { return running_ == 0; });
}

void Watchdog::watch(std::unique_ptr<WatchedOperation> watched) {
  // CUDA's driver is set up by its first call, later than this library is loaded. It has been set
  // up by now, so this static object is destroyed before it.
  static const StopAtExit stop_before_the_driver;
  const std::lock_guard<std::mutex> lock(mutex_);
#ifdef RINGATTN_WITH_CUDA
  if (device_ < 0) cudaGetDevice(&device_);
#endif
  owners_.push_back(watched->owner());
  incoming_.push_back(std::move(watched));
  start();
  // Note: the monitor thread is not woken. It polls soon enough by itself, and waking it in every
  // call costs more than the rest of this function.
}

void Watchdog::drain(const void* owner) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_drains_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !std::count(owners_.begin(), owners_.end(), owner); });
  --num_drains_;
}

void Watchdog::defer_free(std::shared_ptr<void> something) {
  const std::lock_guard<std::mutex> lock(mutex_);
  to_free_.push_back(std::move(something));
  start();
  changed_.notify_all();
}

void Watchdog::every_half_second(void (*task)()) {
  const std::lock_guard<std::mutex> lock(mutex_);
  task_ = task;
  start();
  changed_.notify_all();
}

bool TimeLimited::poll() {
  if (done()) return true;
  if (expired_ || !started()) return false;
  const auto now = Clock::now();
  if (start_ == Clock::time_point{}) start_ = now;
  if (now - start_ >= timeout()) {
    expired_ = true;
    expire();
  } else {
    under_way(std::chrono::duration_cast<std::chrono::milliseconds>(now - start_));
  }
  return false;
}

bool Watchdog::is_over(WatchedOperation& watched) {
  try {
    return watched.poll();
  } catch (const std::exception&) {
    return true;  // the device has failed: CUDA reports that to its next user
  }
}

// Note: not before there is something to watch. A thread's first device is 0, and a context there
// is made by the first call that needs one: memory for nothing, or none at all where CUDA is not
// used.
void Watchdog::use_device() {
#ifdef RINGATTN_WITH_CUDA
  static thread_local bool uses_device = false;
  if (uses_device || device_ < 0) return;
  uses_device = true;
  cudaSetDevice(device_);
  // Calls of this thread must not invalidate a capture that another thread has begun.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
#endif
}

void Watchdog::monitor_loop() {
  constexpr auto kPeriod = std::chrono::milliseconds(20);
  constexpr auto kPeriodWhileDraining = std::chrono::milliseconds(1);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (num_drains_ == 0) {
        changed_.wait_for(lock, kPeriod, [&] { return num_drains_ > 0 || stopping_; });
      } else {
        changed_.wait_for(lock, kPeriodWhileDraining);
      }
      if (stopping_) return;
      if (!incoming_.empty()) use_device();
      watched_.splice(watched_.end(), incoming_);
    }
    Operations over;
    for (auto watched = watched_.begin(); watched != watched_.end();) {
      const auto current = watched++;
      if (is_over(**current)) over.splice(over.end(), watched_, current);
    }
    if (over.empty()) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& watched : over) {
      owners_.erase(std::find(owners_.begin(), owners_.end(), watched->owner()));
    }
    over_.splice(over_.end(), over);
    changed_.notify_all();
  }
}

void Watchdog::reaper_loop() {
  constexpr auto kHousekeeping = std::chrono::milliseconds(500);
  auto next_housekeeping = Clock::now();
  for (;;) {
    Operations over;
    std::list<std::shared_ptr<void>> to_free;
    void (*task)() = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_until(lock, next_housekeeping,
                          [&] { return stopping_ || !over_.empty() || !to_free_.empty(); });
      if (stopping_) return;
      use_device();
      over.swap(over_);
      to_free.swap(to_free_);
      task = task_;
    }
    over.clear();
    to_free.clear();
    if (Clock::now() < next_housekeeping) continue;
    next_housekeeping = Clock::now() + kHousekeeping;
    if (task != nullptr) task();
  }
}

}  // namespace ringattn
