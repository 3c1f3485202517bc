// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "core/export.h"
#include "core/process_singleton.h"

namespace ringattn {

/// An operation that goes on without the host. Only the watchdog's monitor thread calls poll().
class WatchedOperation {
 public:
  virtual ~WatchedOperation() = default;
  virtual const void* owner() const = 0;  // for Watchdog::drain
  /// Called many times a second; does what has to be done. Returns whether the operation is over.
  /// One that throws is over.
  virtual bool poll() = 0;
};

/// An operation with a time limit: a transfer on a CUDA stream.
class RINGATTN_API TimeLimited : public WatchedOperation {
 public:
  bool poll() final;

 protected:
  virtual bool started() = 0;
  virtual bool done() = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  /// The operation started `waited` ago, and is under way.
  virtual void under_way(std::chrono::milliseconds waited) {}
  /// The operation started `timeout` ago and is not done. Must end it, so that done() holds soon.
  virtual void expire() = 0;

 private:
  std::chrono::steady_clock::time_point start_{};  // when it was first seen started
  bool expired_ = false;
};

/// A monitor thread polls all operations in flight; a reaper thread frees those that are over.
/// Freeing device memory may wait for all that runs on a device, and must not keep the monitor from
/// ending what runs there. Thread-safe.
class RINGATTN_API Watchdog {
 public:
  static Watchdog& get();

  void watch(std::unique_ptr<WatchedOperation> watched);
  /// Blocks until nothing of this owner is in flight.
  void drain(const void* owner);
  /// Frees `something` on the reaper thread.
  void defer_free(std::shared_ptr<void> something);
  /// Ends the threads, for good.
  void stop();
  /// The reaper thread calls `task` about twice a second from now on. One task.
  void every_half_second(void (*task)());

 private:
  friend Watchdog& process_singleton<Watchdog>();
  Watchdog() = default;
  void start();
  void monitor_loop();
  void reaper_loop();
  void begin_thread(void (Watchdog::*body)());
  void use_device();
  static bool is_over(WatchedOperation& watched);

  std::mutex mutex_;
  std::condition_variable changed_;
  using Operations = std::list<std::unique_ptr<WatchedOperation>>;
  Operations incoming_;                       // not yet polled
  Operations watched_;                        // used by the monitor thread alone
  Operations over_;                           // to be freed by the reaper thread,
  std::list<std::shared_ptr<void>> to_free_;  // as is this
  std::list<const void*> owners_;             // one for each operation that is not over
  int num_drains_ = 0;                        // threads in drain()
  void (*task_)() = nullptr;
  int device_ = -1;  // of the first that was watched
  int running_ = 0;  // threads
  bool started_ = false;
  bool stopping_ = false;
};

}  // namespace ringattn
