// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

#include "core/export.h"
#include "core/process_singleton.h"

namespace ringattn {

/// A blocking wait that another thread can end early, without any effect on what is waited for.
class Wakeable {
 public:
  virtual ~Wakeable() = default;
  /// Ends the wait that is under way, or the next one. Called from the ticker's thread.
  virtual void wake() = 0;
};

/// A thread that wakes blocking waits every kPeriod, so that the waiting thread can look for news
/// of its peers, for Ctrl-C and at the clock. A wait shorter than that costs two locks and wakes no
/// thread. Thread-safe.
///
/// Note: gloo's own timed waits cannot be used for this. One that times out closes the connections
/// of the whole group.
class RINGATTN_API WaitTicker {
 public:
  static constexpr auto kPeriod = std::chrono::milliseconds(50);

  static WaitTicker& get();

  /// `wait` is woken every kPeriod for as long as this object lives.
  class RINGATTN_API Registration {
   public:
    explicit Registration(Wakeable& wait);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

   private:
    friend class WaitTicker;
    Wakeable& wait_;
    std::chrono::steady_clock::time_point next_;
    std::list<Registration*>::iterator place_;
  };

 private:
  friend WaitTicker& process_singleton<WaitTicker>();
  WaitTicker() = default;
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Registration*> waits_;
  bool started_ = false;
  bool parked_ = false;  // the thread sleeps until there is a wait
};

}  // namespace ringattn
