// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "core/export.h"

namespace ringattn {

/// Something that runs on without the host and should come to an end: a transfer on a CUDA stream.
/// Called from the watchdog's thread only.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual const void* owner() const = 0;  // for Watchdog::drain
  virtual bool started() = 0;
  virtual bool done() = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  /// It started `timeout` ago and is not done. Must end it, so that done() holds soon.
  virtual void expire() = 0;
};

/// One thread that looks after everything that is in flight. Thread-safe.
class RINGATTN_API Watchdog {
 public:
  static Watchdog& get();

  void watch(std::unique_ptr<Watched> watched);
  /// Blocks until nothing of this owner is in flight.
  void drain(const void* owner);
  /// Ends the thread, for good.
  void stop();
  /// `task` is called about twice a second from now on. One task.
  void every_half_second(void (*task)());

 private:
  struct Entry {
    std::unique_ptr<Watched> watched;
    std::chrono::steady_clock::time_point start{};  // when it was first seen started
    bool expired = false;
  };

  Watchdog() = default;
  void start();
  void run();
  void use_device();
  static bool is_over(Entry& entry);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Entry> incoming_;      // handed over, not yet looked at
  std::list<Entry> entries_;       // the thread's own
  std::list<const void*> owners_;  // one for each entry in flight
  int num_drains_ = 0;             // threads in drain()
  void (*task_)() = nullptr;
  int device_ = -1;           // of the first that was watched
  bool uses_device_ = false;  // the thread is set up for it
  bool running_ = false;
  bool stopping_ = false;
};

}  // namespace ringattn
