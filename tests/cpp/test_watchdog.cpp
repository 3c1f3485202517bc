// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "catch.h"
#include "transport/watchdog.h"

using ringattn::Watchdog;
using std::chrono::milliseconds;

namespace {

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

}  // namespace

TEST_CASE("what does not end is ended after its timeout, counted from its start") {
  static State state;
  Watchdog::get().watch(std::make_unique<Fake>(state, milliseconds(50)));
  std::this_thread::sleep_for(milliseconds(150));
  CHECK(!state.expired);  // not started: whoever holds it up is not a peer
  state.started = true;
  Watchdog::get().drain(&state);
  CHECK(state.expired);
}

TEST_CASE("what ends in time is left alone") {
  static State state;
  state.started = true;
  Watchdog::get().watch(std::make_unique<Fake>(state, milliseconds(10000)));
  state.done = true;
  Watchdog::get().drain(&state);
  CHECK(!state.expired);
}
