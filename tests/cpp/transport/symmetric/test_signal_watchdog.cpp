// SPDX-License-Identifier: Apache-2.0
// Waits for peers that do not end, over signals that a test sets.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "fake_backend.h"
#include "transport/group/group_context.h"
#include "transport/symmetric/signal_watchdog.h"
#include "watched_signals.h"

using namespace ringattn::testing;
using ringattn::GroupContext;
using ringattn::Phase;
using ringattn::SignalWatchdog;

TEST_CASE("a late rank ends the group after the patience, at the second poll") {
  Watched watched;
  watched.signals->staged = {0, 9, 5};
  watched.watch.describe(7, steps({0, 1, 2}));
  watched.wait_for_heads(9);
  watched.poll_after(kPatience / 2);
  CHECK(watched.signals->asked == 0);
  watched.poll_after(kPatience * 3 / 4);
  CHECK(watched.signals->asked == 1);
  CHECK(watched.failure().empty());
  CHECK_FALSE(watched.signals->given_up);
  watched.poll_after(milliseconds(1));
  CHECK(watched.failure() ==
        "rank 2 did not take part in step 2 of the ring within the group's timeout of 20000 ms (no "
        "signal came through shared memory); the group cannot be used any more");
  CHECK(watched.signals->given_up);
  CHECK(watched.signals->releases == 1);
}

TEST_CASE(
    "a rank that is late in one exchange is named, exchanges in a row are waits of their own") {
  Watched watched;
  watched.watch.describe(7, steps({0, 0, 0}));
  uint32_t number = 5;
  for (int exchange = 0; exchange < 3; ++exchange) {
    watched.signals->shown_phase = Phase{Phase::kUntilPartial, ++number}.encoded();
    watched.signals->partial = {0, number, 0};
    watched.poll_after(kPatience * 3 / 4);
  }
  CHECK(watched.signals->asked == 0);
  watched.poll_after(kPatience);
  CHECK(watched.signals->asked == 1);
  CHECK(watched.failure().empty());
  watched.poll_after(milliseconds(1));
  CHECK(watched.failure() ==
        "rank 2 did not take part in step 0 of the ring within the group's timeout of 20000 ms (no "
        "signal came through shared memory); the group cannot be used any more");
  CHECK(watched.signals->releases == 1);
}

TEST_CASE("waits for host memory are judged without the device, which may be queued behind them") {
  for (const auto kind :
       {Phase::kStreamUntilStaged, Phase::kStreamUntilRead, Phase::kUntilMirrored}) {
    Watched watched;
    const bool read = kind == Phase::kStreamUntilRead;
    (read ? watched.signals->read_mirror : watched.signals->staged_mirror) = {0, 1, 0};
    watched.signals->answers = false;
    watched.signals->shown_phase = Phase{kind, 1}.encoded();
    CHECK_FALSE(watched.watch.poll());
    watched.poll_after(kPatience + milliseconds(1));
    CHECK(watched.signals->asked == 0);
    CHECK(watched.failure().empty());
    watched.signals->answers = true;  // release() asks it
    watched.poll_after(milliseconds(1));
    CHECK(watched.failure().rfind("rank 2 did not take part in step 1 of the ring", 0) == 0);
    // Later waits are released at every poll.
    CHECK(watched.signals->let_pass == 1);
    watched.poll_after(milliseconds(1));
    CHECK(watched.signals->let_pass == 2);
  }
}

TEST_CASE("signals that are all set end no group: the kernel may not have started") {
  Watched watched;
  watched.signals->staged = {0, 9, 12};
  watched.wait_for_heads(9);
  for (int times = 0; times < 3; ++times) {
    watched.poll_after(kPatience + milliseconds(1));
    watched.poll_after(milliseconds(1));
  }
  CHECK(watched.signals->asked == 3);  // and each time the patience starts again
  CHECK(watched.failure().empty());
  CHECK(watched.signals->releases == 0);
}

TEST_CASE("a mismatch that a kernel has detected ends the group at once") {
  for (const bool waits : {false, true}) {
    for (const bool on_demand : {false, true}) {
      Watched watched;
      if (waits) watched.wait_for_heads(9);
      watched.poll_after(milliseconds(1));
      CHECK(watched.failure().empty());
      watched.signals->mismatch = {2, false};
      if (on_demand) watched.watch.check_mismatch();
      if (!on_demand) watched.poll_after(milliseconds(1));
      CHECK(watched.failure() ==
            "ranks must make the same calls in the same order, got another one on rank 2 than on "
            "rank 0; the group cannot be used any more");
      CHECK(watched.signals->given_up);
      CHECK(watched.signals->releases == 1);
      CHECK(watched.watch.all_read());
    }
  }
}

TEST_CASE("a peer that has only reported a mismatch is not blamed for it") {
  Watched watched;
  watched.signals->mismatch = {1, true};
  watched.watch.check_mismatch();
  CHECK(watched.failure() ==
        "ranks must make the same calls in the same order, and rank 1 has seen one in another "
        "call; the group cannot be used any more");
}

TEST_CASE("a rank that signals before the second poll was only late") {
  Watched watched;
  watched.signals->staged = {0, 9, 5};
  watched.wait_for_heads(9);
  watched.poll_after(kPatience + milliseconds(1));
  watched.signals->staged = {0, 9, 9};
  watched.poll_after(milliseconds(1));
  CHECK(watched.failure().empty());
}

TEST_CASE("streams that make progress, or wait for nothing, end no group") {
  Watched watched;
  watched.wait_for_heads(9);
  for (int times = 0; times < 4; ++times) {
    watched.poll_after(kPatience / 2);
    watched.wait_for_heads(9);  // the next call
  }
  watched.signals->shown_phase = Phase{}.encoded();
  watched.poll_after(kPatience * 2);
  watched.poll_after(kPatience * 2);
  CHECK(watched.signals->asked == 0);
  CHECK(watched.failure().empty());
}

TEST_CASE("a peer that refuses the call of a wait, or has ended the group, ends it at once") {
  const std::vector<std::pair<std::string, std::string>> published = {
      {"call/7/2", "rq must be good, got bad"}, {"ended/2", "rank 2 was interrupted"}};
  const std::vector<std::string> expected = {
      "rank 2 refused a call that other ranks have begun: q must be good, got bad; the group "
      "cannot "
      "be used any more",
      "rank 2 was interrupted"};
  for (size_t which = 0; which < published.size(); ++which) {
    Watched watched;
    watched.signals->staged = {0, 9, 5};
    watched.watch.describe(7, steps({0, 1, 2}));
    watched.wait_for_heads(9);
    watched.poll_after(milliseconds(200));
    CHECK(watched.failure().empty());
    watched.store.put(published[which].first, published[which].second);
    watched.poll_after(milliseconds(200));
    CHECK(watched.failure() == expected[which]);
    CHECK(watched.signals->given_up);
  }
}

TEST_CASE("each wait of a call has a patience of its own") {
  Watched watched;
  watched.wait_for_heads(9);
  watched.poll_after(kPatience * 3 / 4);
  watched.signals->shown_phase = Phase{Phase::kUntilRead, 1}.encoded();
  watched.poll_after(milliseconds(1));
  watched.poll_after(kPatience * 3 / 4);
  CHECK(watched.signals->asked == 0);
}

TEST_CASE("a rank that has not read this rank's block is named too") {
  Watched watched;
  watched.signals->read = {1, 0, 1};
  watched.signals->shown_phase = Phase{Phase::kUntilRead, 1}.encoded();
  CHECK_FALSE(watched.watch.poll());
  watched.poll_after(kPatience + milliseconds(1));
  watched.poll_after(milliseconds(1));
  CHECK(watched.failure().rfind("rank 1 did not take part in step 1 of the ring", 0) == 0);
}

TEST_CASE("a device that does not answer gets a little longer, and does not block the watchdog") {
  Watched watched;
  watched.signals->answers = false;
  watched.wait_for_heads(9);
  const auto start = std::chrono::steady_clock::now();
  watched.poll_after(kPatience + milliseconds(1));
  CHECK(std::chrono::steady_clock::now() - start < kPatience);
  CHECK(watched.failure().empty());
  CHECK_FALSE(watched.signals->given_up);
  watched.poll_after(kSoon);
  CHECK(watched.failure().rfind("rank 1 or rank 2 did not take part in step 1", 0) == 0);
  CHECK(watched.signals->given_up);  // which needs no device
  CHECK(watched.signals->releases == 0);
  // Once it answers again, its kernels are released too.
  watched.signals->answers = true;
  for (int times = 0; watched.signals->releases == 0 && times < 5000; ++times) {
    std::this_thread::sleep_for(milliseconds(1));
    watched.poll_after(milliseconds(0));
  }
  CHECK(watched.signals->releases == 1);
}

TEST_CASE("the silence of a device counts anew for each wait") {
  Watched watched;
  watched.signals->answers = false;
  watched.wait_for_heads(9);
  watched.poll_after(kPatience + milliseconds(1));
  watched.wait_for_heads(9);  // the next call
  watched.poll_after(kPatience + milliseconds(1));
  CHECK(watched.failure().empty());
}

TEST_CASE("a device that answers again in time is asked for its signals") {
  Watched watched;
  watched.signals->staged = {0, 9, 9};
  watched.signals->answers = false;
  watched.wait_for_heads(9);
  watched.poll_after(kPatience + milliseconds(1));
  watched.signals->answers = true;
  for (int times = 0; watched.signals->asked < 2 && times < 5000;
       ++times) {  // the earlier question ends, and another one follows
    std::this_thread::sleep_for(milliseconds(1));
    watched.poll_after(milliseconds(0));
  }
  watched.poll_after(kSoon);
  CHECK(watched.failure().empty());
  CHECK_FALSE(watched.signals->given_up);
}

TEST_CASE("after giving up, later kernels are released too, but not at every poll") {
  Watched watched;
  watched.wait_for_heads(9);
  watched.poll_after(kPatience + milliseconds(1));
  watched.poll_after(milliseconds(1));
  REQUIRE(watched.signals->releases == 1);
  for (int times = 0; times < 5; ++times) watched.poll_after(milliseconds(1));
  CHECK(watched.signals->releases == 1);
  watched.wait_for_heads(9);  // a call that was made before the host knew
  CHECK(watched.signals->releases == 2);
  watched.poll_after(milliseconds(600));
  CHECK(watched.signals->releases == 3);
}

TEST_CASE("the watchdog may hold the last reference to the group, whose destructor closes it") {
  // The test drops its reference while the store is asked; the group's destructor closes the
  // watchdog.
  struct LeavingBackend : FakeBackend {
    using FakeBackend::FakeBackend;
    ~LeavingBackend() override { at_end(); }
    void put(const std::string& key, const std::string& value) override {
      FakeBackend::put(key, value);
      at_put();
    }
    std::function<void()> at_put, at_end;
  };
  Store store;
  auto peers = std::make_unique<LeavingBackend>(store, 0, 3, kTimeout);
  LeavingBackend& hooks = *peers;
  auto group = std::make_shared<GroupContext>(std::move(peers));
  const auto signals = std::make_shared<FakeSignals>();
  auto now = SignalWatchdog::Clock::now();
  SignalWatchdog watch(group->rendezvous(), signals, [&] { return now; });
  hooks.at_put = [&] { group.reset(); };
  hooks.at_end = [&] { watch.close(); };
  signals->shown_phase = Phase{Phase::kUntilStaged, 9}.encoded();
  CHECK_FALSE(watch.poll());
  for (int times = 0; times < 2; ++times) {
    now += kPatience;
    CHECK_FALSE(watch.poll());
  }
  CHECK(signals->given_up);
  for (int times = 0; !watch.poll() && times < 5000; ++times) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(watch.poll());
}

TEST_CASE("waits are released although the group is gone, and a closed watchdog is over") {
  Watched watched;
  watched.group.reset();
  watched.wait_for_heads(9);
  watched.poll_after(kPatience + milliseconds(1));
  watched.poll_after(milliseconds(1));
  CHECK(watched.signals->given_up);
  CHECK(watched.signals->releases == 1);
  CHECK(watched.watch.all_read());  // as far as it ever will be
  watched.watch.close();
  CHECK(watched.watch.poll());
}

TEST_CASE("all_read: once all peers have read, or the patience is over") {
  Watched watched;
  watched.signals->read = {0, 1, 0};
  CHECK_FALSE(watched.watch.all_read());
  watched.signals->read = {0, 1, 1};
  CHECK(watched.watch.all_read());
  watched.signals->read_mirror = {0, 1, 0};
  CHECK_FALSE(watched.watch.all_read());
  watched.signals->read_mirror = {0, 1, 1};
  watched.signals->read = {0, 0, 1};
  CHECK_FALSE(watched.watch.all_read());
  watched.now += kPatience;
  CHECK(watched.watch.all_read());
}
