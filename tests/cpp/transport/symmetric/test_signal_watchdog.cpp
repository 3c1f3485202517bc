// SPDX-License-Identifier: Apache-2.0
// Waits for other ranks that do not end, over words that a test sets.
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "fake_peers.h"
#include "transport/group/ring_group.h"
#include "transport/symmetric/signal_watchdog.h"

using ringattn::Phase;
using ringattn::RingGroup;
using ringattn::SignalWatch;
using ringattn::testing::FakePeers;
using ringattn::testing::Store;
using std::chrono::milliseconds;

namespace {

constexpr auto kTimeout = milliseconds(20000);  // so that answers are no question of load
constexpr auto kPatience = kTimeout * 4 / 5;
constexpr auto kSoon = kPatience / 16;

class FakeWords : public ringattn::WatchedWords {
 public:
  uint32_t phase() const override { return shown_phase; }
  uint32_t calls() const override { return shown_calls; }
  std::vector<uint32_t> come(Phase::Kind kind) override {
    if (kind == Phase::kStreamUntilRead) return copied;
    if (kind != Phase::kUntilRead && kind != Phase::kUntilStaged) return staged_for_streams;
    answer();
    return kind == Phase::kUntilRead ? read : staged;
  }
  std::optional<Unlike> unlike_seen() const override { return seen; }
  void give_up() override {
    given_up = true;
    ++let_pass;
  }
  void release() override {
    answer();
    ++releases;
  }

  std::atomic<uint32_t> shown_phase{Phase{}.word()}, shown_calls{0};
  std::vector<uint32_t> staged = {0, 0, 0}, read = {0, 0, 0};
  std::vector<uint32_t> staged_for_streams = {0, 0, 0}, copied = {0, 1, 1};
  std::optional<Unlike> seen;
  std::atomic<bool> answers{true}, given_up{false};
  std::atomic<int> asked{0}, releases{0}, let_pass{0};

 private:
  void answer() {
    ++asked;
    while (!answers) std::this_thread::sleep_for(milliseconds(1));
  }
};

// Rank 0 of three, and who watches over its waits.
struct Watched {
  Store store;
  std::shared_ptr<RingGroup> group =
      std::make_shared<RingGroup>(std::make_unique<FakePeers>(store, 0, 3, kTimeout));
  std::shared_ptr<FakeWords> words = std::make_shared<FakeWords>();
  SignalWatch::Clock::time_point now = SignalWatch::Clock::now();
  SignalWatch watch{*group, words, [this] { return now; }};

  ~Watched() { words->answers = true; }  // no thread stays behind

  void wait_for_heads(uint32_t heads) {
    words->shown_phase = Phase{Phase::kUntilStaged, heads}.word();
    ++words->shown_calls;
    CHECK_FALSE(watch.look());
  }
  void look_after(milliseconds time) {
    now += time;
    CHECK_FALSE(watch.look());
  }
  std::string failure() const {
    try {
      group->throw_if_failed();
    } catch (const c10::DistBackendError& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
};

std::shared_ptr<const std::vector<int64_t>> steps(std::vector<int64_t> of_ranks) {
  return std::make_shared<const std::vector<int64_t>>(std::move(of_ranks));
}

}  // namespace

TEST_CASE("a rank that does not come is given up on after the patience, at the second look") {
  Watched watched;
  watched.words->staged = {0, 9, 5};
  watched.watch.describe(7, steps({0, 1, 2}));
  watched.wait_for_heads(9);
  watched.look_after(kPatience / 2);
  CHECK(watched.words->asked == 0);
  watched.look_after(kPatience * 3 / 4);
  CHECK(watched.words->asked == 1);
  CHECK(watched.failure().empty());
  CHECK_FALSE(watched.words->given_up);
  watched.look_after(milliseconds(1));
  CHECK(watched.failure() ==
        "rank 2 did not take part in step 2 of the ring within the group's timeout of 20000 ms (no "
        "signal came through shared memory); the group cannot be used any more");
  CHECK(watched.words->given_up);
  CHECK(watched.words->releases == 1);
}

TEST_CASE("waits for host memory need no answer of the device, which may be behind them in line") {
  for (const auto kind : {Phase::kStreamUntilStaged, Phase::kStreamUntilRead, Phase::kUntilTold}) {
    Watched watched;
    const bool read = kind == Phase::kStreamUntilRead;
    (read ? watched.words->copied : watched.words->staged_for_streams) = {0, 1, 0};
    watched.words->answers = false;
    watched.words->shown_phase = Phase{kind, 1}.word();
    CHECK_FALSE(watched.watch.look());
    watched.look_after(kPatience + milliseconds(1));
    CHECK(watched.words->asked == 0);
    CHECK(watched.failure().empty());
    watched.words->answers = true;  // it is asked to let kernels pass, too
    watched.look_after(milliseconds(1));
    CHECK(watched.failure().rfind("rank 2 did not take part in step 1 of the ring", 0) == 0);
    // And what comes to wait later is let pass at every look.
    CHECK(watched.words->let_pass == 1);
    watched.look_after(milliseconds(1));
    CHECK(watched.words->let_pass == 2);
  }
}

TEST_CASE("what all have come to is no loss: a kernel may have yet to begin") {
  Watched watched;
  watched.words->staged = {0, 9, 12};
  watched.wait_for_heads(9);
  for (int times = 0; times < 3; ++times) {
    watched.look_after(kPatience + milliseconds(1));
    watched.look_after(milliseconds(1));
  }
  CHECK(watched.words->asked == 3);  // and each time the patience begins anew
  CHECK(watched.failure().empty());
  CHECK(watched.words->releases == 0);
}

TEST_CASE("a rank that a kernel has seen in another call ends the group at once") {
  for (const bool waits : {false, true}) {
    for (const bool on_demand : {false, true}) {
      Watched watched;
      if (waits) watched.wait_for_heads(9);
      watched.look_after(milliseconds(1));
      CHECK(watched.failure().empty());
      watched.words->seen = {2, false};
      if (on_demand) watched.watch.notice();
      if (!on_demand) watched.look_after(milliseconds(1));
      CHECK(watched.failure() ==
            "ranks must make the same calls in the same order, got another one on rank 2 than on "
            "rank 0; the group cannot be used any more");
      CHECK(watched.words->given_up);
      CHECK(watched.words->releases == 1);
      CHECK(watched.watch.all_read());
    }
  }
}

TEST_CASE("who has seen a rank in another call is not said to be in one") {
  Watched watched;
  watched.words->seen = {1, true};
  watched.watch.notice();
  CHECK(watched.failure() ==
        "ranks must make the same calls in the same order, and rank 1 has seen one in another "
        "call; the group cannot be used any more");
}

TEST_CASE("who has come by the second look was only late") {
  Watched watched;
  watched.words->staged = {0, 9, 5};
  watched.wait_for_heads(9);
  watched.look_after(kPatience + milliseconds(1));
  watched.words->staged = {0, 9, 9};
  watched.look_after(milliseconds(1));
  CHECK(watched.failure().empty());
}

TEST_CASE("streams that get on are left alone, and those that wait for nobody") {
  Watched watched;
  watched.wait_for_heads(9);
  for (int times = 0; times < 4; ++times) {
    watched.look_after(kPatience / 2);
    watched.wait_for_heads(9);  // the next call
  }
  watched.words->shown_phase = Phase{}.word();
  watched.look_after(kPatience * 2);
  watched.look_after(kPatience * 2);
  CHECK(watched.words->asked == 0);
  CHECK(watched.failure().empty());
}

TEST_CASE("a peer that refuses the call of a wait, or has ended the group, ends it at once") {
  const std::vector<std::pair<std::string, std::string>> published = {
      {"call/7/2", "rq must be good, got bad"}, {"ended/2", "rank 2 was interrupted"}};
  const std::vector<std::string> said = {
      "rank 2 refused a call that other ranks have begun: q must be good, got bad; the group "
      "cannot "
      "be used any more",
      "rank 2 was interrupted"};
  for (size_t which = 0; which < published.size(); ++which) {
    Watched watched;
    watched.words->staged = {0, 9, 5};
    watched.watch.describe(7, steps({0, 1, 2}));
    watched.wait_for_heads(9);
    watched.look_after(milliseconds(200));
    CHECK(watched.failure().empty());
    watched.store.put(published[which].first, published[which].second);
    watched.look_after(milliseconds(200));
    CHECK(watched.failure() == said[which]);
    CHECK(watched.words->given_up);
  }
}

TEST_CASE("another wait of the same call has a patience of its own") {
  Watched watched;
  watched.wait_for_heads(9);
  watched.look_after(kPatience * 3 / 4);
  watched.words->shown_phase = Phase{Phase::kUntilRead, 1}.word();
  watched.look_after(milliseconds(1));
  watched.look_after(kPatience * 3 / 4);
  CHECK(watched.words->asked == 0);
}

TEST_CASE("whoever has not read what is here is named as well") {
  Watched watched;
  watched.words->read = {1, 0, 1};
  watched.words->shown_phase = Phase{Phase::kUntilRead, 1}.word();
  CHECK_FALSE(watched.watch.look());
  watched.look_after(kPatience + milliseconds(1));
  watched.look_after(milliseconds(1));
  CHECK(watched.failure().rfind("rank 1 did not take part in step 1 of the ring", 0) == 0);
}

TEST_CASE("a device that does not answer is waited for a little longer, and holds nobody up") {
  Watched watched;
  watched.words->answers = false;
  watched.wait_for_heads(9);
  const auto start = std::chrono::steady_clock::now();
  watched.look_after(kPatience + milliseconds(1));
  CHECK(std::chrono::steady_clock::now() - start < kPatience);
  CHECK(watched.failure().empty());
  CHECK_FALSE(watched.words->given_up);
  watched.look_after(kSoon);
  CHECK(watched.failure().rfind("rank 1 or rank 2 did not take part in step 1", 0) == 0);
  CHECK(watched.words->given_up);  // which needs no device
  CHECK(watched.words->releases == 0);
  // When it answers again, what waits there is let pass, too.
  watched.words->answers = true;
  for (int times = 0; watched.words->releases == 0 && times < 5000; ++times) {
    std::this_thread::sleep_for(milliseconds(1));
    watched.look_after(milliseconds(0));
  }
  CHECK(watched.words->releases == 1);
}

TEST_CASE("each wait has silence of its own") {
  Watched watched;
  watched.words->answers = false;
  watched.wait_for_heads(9);
  watched.look_after(kPatience + milliseconds(1));
  watched.wait_for_heads(9);  // the next call
  watched.look_after(kPatience + milliseconds(1));
  CHECK(watched.failure().empty());
}

TEST_CASE("a device that answers again before that is asked what it has seen") {
  Watched watched;
  watched.words->staged = {0, 9, 9};
  watched.words->answers = false;
  watched.wait_for_heads(9);
  watched.look_after(kPatience + milliseconds(1));
  watched.words->answers = true;
  for (int times = 0; watched.words->asked < 2 && times < 5000;
       ++times) {  // what was asked before is over, and it is asked again
    std::this_thread::sleep_for(milliseconds(1));
    watched.look_after(milliseconds(0));
  }
  watched.look_after(kSoon);
  CHECK(watched.failure().empty());
  CHECK_FALSE(watched.words->given_up);
}

TEST_CASE("once given up, what comes later is let pass too, but not at every look") {
  Watched watched;
  watched.wait_for_heads(9);
  watched.look_after(kPatience + milliseconds(1));
  watched.look_after(milliseconds(1));
  REQUIRE(watched.words->releases == 1);
  for (int times = 0; times < 5; ++times) watched.look_after(milliseconds(1));
  CHECK(watched.words->releases == 1);
  watched.wait_for_heads(9);  // a call that was made before the host knew
  CHECK(watched.words->releases == 2);
  watched.look_after(milliseconds(600));
  CHECK(watched.words->releases == 3);
}

TEST_CASE("who gives up may be the last to hold the group, whose end closes the watch") {
  // The group is let go of while its store is asked, and closes the watch as it ends.
  struct LeavingPeers : FakePeers {
    using FakePeers::FakePeers;
    ~LeavingPeers() override { at_end(); }
    void put(const std::string& key, const std::string& value) override {
      FakePeers::put(key, value);
      at_put();
    }
    std::function<void()> at_put, at_end;
  };
  Store store;
  auto peers = std::make_unique<LeavingPeers>(store, 0, 3, kTimeout);
  LeavingPeers& hooks = *peers;
  auto group = std::make_shared<RingGroup>(std::move(peers));
  const auto words = std::make_shared<FakeWords>();
  auto now = SignalWatch::Clock::now();
  SignalWatch watch(*group, words, [&] { return now; });
  hooks.at_put = [&] { group.reset(); };
  hooks.at_end = [&] { watch.close(); };
  words->shown_phase = Phase{Phase::kUntilStaged, 9}.word();
  CHECK_FALSE(watch.look());
  for (int times = 0; times < 2; ++times) {
    now += kPatience;
    CHECK_FALSE(watch.look());
  }
  CHECK(words->given_up);
  for (int times = 0; !watch.look() && times < 5000; ++times) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK(watch.look());
}

TEST_CASE("what waits is let pass though its group is gone, and a closed watch is over") {
  Watched watched;
  watched.group.reset();
  watched.wait_for_heads(9);
  watched.look_after(kPatience + milliseconds(1));
  watched.look_after(milliseconds(1));
  CHECK(watched.words->given_up);
  CHECK(watched.words->releases == 1);
  CHECK(watched.watch.all_read());  // as far as it ever will
  watched.watch.close();
  CHECK(watched.watch.look());
}

TEST_CASE("a group that has gone is waited for until all have read, or will not any more") {
  Watched watched;
  watched.words->read = {0, 1, 0};
  CHECK_FALSE(watched.watch.all_read());
  watched.words->read = {0, 1, 1};
  CHECK(watched.watch.all_read());
  watched.words->copied = {0, 1, 0};
  CHECK_FALSE(watched.watch.all_read());
  watched.words->copied = {0, 1, 1};
  watched.words->read = {0, 0, 1};
  CHECK_FALSE(watched.watch.all_read());
  watched.now += kPatience;
  CHECK(watched.watch.all_read());
}
