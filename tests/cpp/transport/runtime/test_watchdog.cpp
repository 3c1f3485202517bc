// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "catch.h"
#include "transport/runtime/watchdog.h"

using ringattn::Watchdog;
using std::chrono::milliseconds;

namespace {

constexpr auto kLong = milliseconds(60000);  // more than a busy machine takes

struct State {
  std::atomic<bool> started{false}, done{false}, expired{false};
};

// Ends by itself when told to, or when it is expired.
class Fake : public ringattn::TimeLimited {
 public:
  Fake(State& state, milliseconds timeout) : state_(state), timeout_(timeout) {}
  const void* owner() const override { return &state_; }
  bool started() override { return state_.started; }
  bool done() override { return state_.done; }
  milliseconds timeout() const override { return timeout_; }
  void expire() override {
    state_.expired = true;
    state_.done = true;
  }

 private:
  State& state_;
  milliseconds timeout_;
};

// Over at once; freeing it takes until `go_on`.
class SlowToFree : public ringattn::WatchedOperation {
 public:
  SlowToFree(std::atomic<bool>& go_on, std::atomic<bool>& freed) : go_on_(go_on), freed_(freed) {}
  ~SlowToFree() override {
    while (!go_on_) std::this_thread::sleep_for(milliseconds(1));
    freed_ = true;
  }
  const void* owner() const override { return &go_on_; }
  bool poll() override { return true; }

 private:
  std::atomic<bool>&go_on_, &freed_;
};

}  // namespace

TEST_CASE("what does not end is ended after its timeout, counted from its start") {
  static State state;
  const auto timeout = milliseconds(300);
  Watchdog::get().watch(std::make_unique<Fake>(state, timeout));
  std::this_thread::sleep_for(milliseconds(100));
  CHECK(!state.expired);  // not started: whoever holds it up is not a peer
  const auto start = std::chrono::steady_clock::now();
  state.started = true;
  Watchdog::get().drain(&state);
  CHECK(state.expired);
  CHECK(std::chrono::steady_clock::now() - start >= timeout);
}

TEST_CASE("what ends in time is left alone") {
  static State state;
  state.started = true;
  Watchdog::get().watch(std::make_unique<Fake>(state, kLong));
  std::this_thread::sleep_for(milliseconds(100));  // it is looked at a few times
  state.done = true;
  Watchdog::get().drain(&state);
  CHECK(!state.expired);
}

TEST_CASE("what takes long to free keeps nothing else from being ended") {
  static State state;
  static std::atomic<bool> go_on{false}, freed{false};
  Watchdog::get().watch(std::make_unique<SlowToFree>(go_on, freed));
  Watchdog::get().drain(&go_on);
  state.started = true;
  Watchdog::get().watch(std::make_unique<Fake>(state, milliseconds(50)));
  std::thread([] {  // so that a failure is one, and no hang
    std::this_thread::sleep_for(kLong);
    go_on = true;
  })
      .detach();
  Watchdog::get().drain(&state);
  CHECK(state.expired);
  CHECK(!freed);
  go_on = true;
}

TEST_CASE("what is let go of is freed soon, and not by who lets go") {
  std::promise<std::thread::id> freed;
  auto by = freed.get_future();
  const auto tell = [&](int* something) {
    delete something;
    freed.set_value(std::this_thread::get_id());
  };
  Watchdog::get().defer_free(std::shared_ptr<int>(new int, tell));
  REQUIRE(by.wait_for(kLong) == std::future_status::ready);
  CHECK(by.get() != std::this_thread::get_id());
}

TEST_CASE("a forked process has a watchdog of its own") {
  static State state;
  Watchdog::get().every_half_second([] {});  // its threads run
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(600);  // ends a child that waits for threads which have not been forked
    state.started = true;
    Watchdog::get().watch(std::make_unique<Fake>(state, milliseconds(100)));
    Watchdog::get().drain(&state);
    const auto start = std::chrono::steady_clock::now();
    Watchdog::get().stop();
    const bool soon = std::chrono::steady_clock::now() - start < kLong;
    _exit(state.expired && soon ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
