// SPDX-License-Identifier: Apache-2.0
#include "transport/runtime/wait_ticker.h"

#include <thread>

namespace ringattn {

using Clock = std::chrono::steady_clock;

WaitTicker& WaitTicker::get() { return process_singleton<WaitTicker>(); }

WaitTicker::Registration::Registration(Wakeable& wait)
    : wait_(wait), next_(Clock::now() + kPeriod) {
  WaitTicker& ticker = get();
  const std::lock_guard<std::mutex> lock(ticker.mutex_);
  if (!ticker.started_) {  // first: where no thread can be had, nothing is left behind
    std::thread([&ticker] { ticker.run(); }).detach();
    ticker.started_ = true;
  }
  place_ = ticker.waits_.insert(ticker.waits_.end(), this);
  if (ticker.parked_) ticker.changed_.notify_one();
}

WaitTicker::Registration::~Registration() {
  WaitTicker& ticker = get();
  const std::lock_guard<std::mutex> lock(ticker.mutex_);
  ticker.waits_.erase(place_);
}

void WaitTicker::run() {
  // Calls that follow each other find the thread awake, and need not wake it.
  constexpr int kIdleRoundsUntilParked = 100;
  int idle_rounds = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (waits_.empty() && ++idle_rounds >= kIdleRoundsUntilParked) {
      parked_ = true;
      changed_.wait(lock, [&] { return !waits_.empty(); });
      parked_ = false;
    }
    if (!waits_.empty()) idle_rounds = 0;
    const auto now = Clock::now();
    for (Registration* registered : waits_) {
      if (now < registered->next_) continue;
      registered->next_ = now + kPeriod;
      registered->wait_.wake();
    }
    lock.unlock();
    std::this_thread::sleep_for(kPeriod / 2);
    lock.lock();
  }
}

}  // namespace ringattn
