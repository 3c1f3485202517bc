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

/// Something that goes on without the host. look() is called from the watchdog's thread only.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual const void* owner() const = 0;  // for Watchdog::drain
  /// Called many times a second; does what has to be done. Whether it is over. What throws is over.
  virtual bool look() = 0;
};

/// What should come to an end in time: a transfer on a CUDA stream.
class RINGATTN_API TimeLimited : public Watched {
 public:
  bool look() final;

 protected:
  virtual bool started() = 0;
  virtual bool done() = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  /// It started `waited` ago, and is under way.
  virtual void under_way(std::chrono::milliseconds waited) {}
  /// It started `timeout` ago and is not done. Must end it, so that done() holds soon.
  virtual void expire() = 0;

 private:
  std::chrono::steady_clock::time_point start_{};  // when it was first seen started
  bool expired_ = false;
};

/// A thread that looks after everything that is in flight, and one that frees what is over: freeing
/// device memory may wait for all that runs on a device, and must not keep the first from ending
/// what runs there. Thread-safe.
class RINGATTN_API Watchdog {
 public:
  static Watchdog& get();

  void watch(std::unique_ptr<Watched> watched);
  /// Blocks until nothing of this owner is in flight.
  void drain(const void* owner);
  /// Lets go of something on the thread that frees.
  void free_later(std::shared_ptr<void> something);
  /// Ends the threads, for good.
  void stop();
  /// `task` is called about twice a second from now on, by the thread that frees. One task.
  void every_half_second(void (*task)());

 private:
  friend Watchdog& process_singleton<Watchdog>();
  Watchdog() = default;
  void start();
  void look_after();  // the first thread
  void free_up();     // the second
  void begin_thread(void (Watchdog::*body)());
  void use_device();
  static bool is_over(Watched& watched);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::unique_ptr<Watched>> incoming_;  // handed over, not yet looked at
  std::list<std::unique_ptr<Watched>> watched_;   // the first thread's own
  std::list<std::unique_ptr<Watched>> over_;      // to be freed,
  std::list<std::shared_ptr<void>> let_go_;       // and to be let go of
  std::list<const void*> owners_;                 // one for each of both
  int num_drains_ = 0;                            // threads in drain()
  void (*task_)() = nullptr;
  int device_ = -1;  // of the first that was watched
  int running_ = 0;  // threads
  bool started_ = false;
  bool stopping_ = false;
};

}  // namespace ringattn
