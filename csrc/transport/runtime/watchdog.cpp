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

// What is set up last ends first: destroyed before what was loaded earlier, torch among it.
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
  begin_thread(&Watchdog::look_after);
  begin_thread(&Watchdog::free_up);
}

void Watchdog::stop() {
  constexpr auto kPatience = std::chrono::seconds(5);  // freeing a communicator takes a while
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, kPatience, [&] { return running_ == 0; });
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

void Watchdog::free_later(std::shared_ptr<void> something) {
  const std::lock_guard<std::mutex> lock(mutex_);
  let_go_.push_back(std::move(something));
  start();
  changed_.notify_all();
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
  } else {
    under_way(std::chrono::duration_cast<std::chrono::milliseconds>(now - start_));
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
  static thread_local bool uses_device = false;
  if (uses_device || device_ < 0) return;
  uses_device = true;
  cudaSetDevice(device_);
  // A capture that some other thread has begun is none of this one's business, and must survive it.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
#endif
}

void Watchdog::look_after() {
  constexpr auto kGlance = std::chrono::milliseconds(20);
  constexpr auto kGlanceWhileDraining = std::chrono::milliseconds(1);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (num_drains_ == 0) {
        changed_.wait_for(lock, kGlance, [&] { return num_drains_ > 0 || stopping_; });
      } else {
        changed_.wait_for(lock, kGlanceWhileDraining);
      }
      if (stopping_) return;
      if (!incoming_.empty()) use_device();
      watched_.splice(watched_.end(), incoming_);
    }
    std::list<std::unique_ptr<Watched>> over;
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

void Watchdog::free_up() {
  constexpr auto kHousekeeping = std::chrono::milliseconds(500);
  auto next_housekeeping = Clock::now();
  for (;;) {
    std::list<std::unique_ptr<Watched>> over;
    std::list<std::shared_ptr<void>> let_go;
    void (*task)() = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_until(lock, next_housekeeping,
                          [&] { return stopping_ || !over_.empty() || !let_go_.empty(); });
      if (stopping_) return;
      use_device();
      over.swap(over_);
      let_go.swap(let_go_);
      task = task_;
    }
    over.clear();
    let_go.clear();
    if (Clock::now() < next_housekeeping) continue;
    next_housekeeping = Clock::now() + kHousekeeping;
    if (task != nullptr) task();
  }
}

}  // namespace ringattn
