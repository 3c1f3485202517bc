// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "fake_backend.h"
#include "transport/group/group_context.h"
#include "transport/symmetric/signal_watchdog.h"

namespace ringattn::testing {

inline constexpr auto kTimeout =
    milliseconds(20000);  // far longer than an answer takes on a loaded machine
inline constexpr auto kPatience = kTimeout * 4 / 5;
inline constexpr auto kSoon = kPatience / 16;

/// Signals that a test sets.
class FakeSignals : public WatchedSignals {
 public:
  uint32_t phase() const override { return shown_phase; }
  uint32_t calls() const override { return shown_calls; }
  std::vector<uint32_t> progress(Phase::Kind kind) override {
    if (kind == Phase::kStreamUntilRead) return read_mirror;
    if (Phase{kind}.in_host_memory()) return staged_mirror;
    answer();
    if (kind == Phase::kUntilPartial) return partial;
    return kind == Phase::kUntilRead ? read : staged;
  }
  std::optional<CallMismatch> call_mismatch() const override { return mismatch; }
  void give_up() override {
    given_up = true;
    ++let_pass;
  }
  void release() override {
    answer();
    ++releases;
  }

  std::atomic<uint32_t> shown_phase{Phase{}.encoded()}, shown_calls{0};
  std::vector<uint32_t> staged = {0, 0, 0}, read = {0, 0, 0}, partial = {0, 0, 0};
  std::vector<uint32_t> staged_mirror = {0, 0, 0}, read_mirror = {0, 1, 1};
  std::optional<CallMismatch> mismatch;
  std::atomic<bool> answers{true}, given_up{false};
  std::atomic<int> asked{0}, releases{0}, let_pass{0};

 private:
  void answer() {
    ++asked;
    while (!answers) std::this_thread::sleep_for(milliseconds(1));
  }
};

/// Rank 0 of three, and the watchdog of its waits.
struct Watched {
  Store store;
  std::shared_ptr<GroupContext> group =
      std::make_shared<GroupContext>(std::make_unique<FakeBackend>(store, 0, 3, kTimeout));
  std::shared_ptr<FakeSignals> signals = std::make_shared<FakeSignals>();
  SignalWatchdog::Clock::time_point now = SignalWatchdog::Clock::now();
  SignalWatchdog watch{group->rendezvous(), signals, [this] { return now; }};

  ~Watched() { signals->answers = true; }  // ends the thread that waits for an answer

  void wait_for_heads(uint32_t heads) {
    signals->shown_phase = Phase{Phase::kUntilStaged, heads}.encoded();
    ++signals->shown_calls;
    CHECK_FALSE(watch.poll());
  }
  void poll_after(milliseconds time) {
    now += time;
    CHECK_FALSE(watch.poll());
  }
  std::string failure() const {
    try {
      group->failures().throw_if_failed();
    } catch (const c10::DistBackendError& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
};

inline std::shared_ptr<const std::vector<int64_t>> steps(std::vector<int64_t> step_of_rank) {
  return std::make_shared<const std::vector<int64_t>>(std::move(step_of_rank));
}

}  // namespace ringattn::testing
