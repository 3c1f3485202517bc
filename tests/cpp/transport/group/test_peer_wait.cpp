// SPDX-License-Identifier: Apache-2.0
// What a rank that waits finds out from its peers, through the store.
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "catch.h"
#include "core/interrupt.h"
#include "fake_backend.h"
#include "transport/group/group_context.h"
#include "transport/group/peer_wait.h"
#include "transport/runtime/wait_ticker.h"

using namespace ringattn;
using ringattn::testing::FakeBackend;
using ringattn::testing::Store;
using std::chrono::milliseconds;

namespace {

// Two ranks that have agreed on calls 0 (of 4 heads) and 1 (of 8 heads) with tensors on CPU.
struct Pair {
  Pair() {
    for (const int64_t rank : {0, 1}) {
      groups[rank] = std::make_shared<GroupContext>(
          std::make_unique<FakeBackend>(store, rank, /*size=*/2, milliseconds(60000)));
    }
    std::thread other([&] { agree(*groups[1]); });
    agree(*groups[0]);
    other.join();
  }
  static void agree(GroupContext& group) {
    begin(group, 4);
    begin(group, 8);
  }
  static int64_t begin(GroupContext& group, int64_t heads) {
    return group.begin_call(
        std::make_shared<const Signature>(Signature("call").add("heads", heads)), /*tagged=*/true);
  }
  GroupContext& operator[](int64_t rank) { return *groups[rank]; }
  // What rank `rank` finds while it waits in a call for the other one: the error's text, or "".
  std::string poll(int64_t rank, int64_t call) {
    PeerWait wait(groups[rank]->rendezvous(), call, /*step=*/1, {1 - rank});
    return said([&] { wait.poll(); });
  }
  static std::string said(const std::function<void()>& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  Store store;
  std::shared_ptr<GroupContext> groups[2];
};

}  // namespace

TEST_CASE("a rank that waits for one in the same call goes on waiting") {
  Pair pair;
  for (const int64_t rank : {0, 1}) Pair::begin(pair[rank], 4);
  for (int times = 0; times < 3; ++times) {
    CHECK(pair.poll(0, 2) == "");
    CHECK(pair.poll(1, 2) == "");
  }
}

TEST_CASE("ranks in known calls that differ find it while they wait, and the group works on") {
  Pair pair;
  Pair::begin(pair[0], 4);
  Pair::begin(pair[1], 8);
  CHECK(pair.poll(0, 2) == "");  // rank 1 has not waited long enough to say what it asks for
  const std::string sentence =
      "ringattn: ranks must agree on heads, got 4 on rank 0 and 8 on rank 1";
  CHECK(pair.poll(1, 2) == sentence);
  CHECK(pair.poll(0, 2) == sentence);
  for (const int64_t rank : {0, 1}) CHECK(Pair::begin(pair[rank], 4) == 3);
  CHECK(pair.poll(0, 3) == "");
}

TEST_CASE("a rank that is one call ahead still says what it asked for before") {
  Pair pair;
  Pair::begin(pair[0], 4);
  for (const int64_t heads : {8, 4}) Pair::begin(pair[1], heads);
  CHECK(pair.poll(1, 3) == "");
  CHECK(pair.poll(0, 2) == "ringattn: ranks must agree on heads, got 4 on rank 0 and 8 on rank 1");
}

TEST_CASE("a rank that refuses a known call is heard by one that waits, and the group works on") {
  Pair pair;
  const int64_t call = Pair::begin(pair[0], 4);
  pair[1].refuse_call("ringattn: q must be good, got bad");
  const auto body = [&]() -> int {
    PeerWait(pair[0].rendezvous(), call, /*step=*/1, {1}).poll();
    return 0;
  };
  CHECK(Pair::said([&] { pair[0].run(call, body); }) ==
        "ringattn: rank 1: q must be good, got bad");
  CHECK_NOTHROW(pair[0].failures().throw_if_failed());
  for (const int64_t rank : {0, 1}) CHECK(Pair::begin(pair[rank], 4) == 3);
}

TEST_CASE("after a refused call that the other rank completed, both agree on a new one") {
  Pair pair;
  Pair::begin(pair[0], 4);  // it needs nothing from rank 1
  pair[1].refuse_call("ringattn: q must be good, got bad");
  std::string other;
  std::thread thread([&] { other = Pair::said([&] { Pair::begin(pair[1], 16); }); });
  CHECK(Pair::said([&] { Pair::begin(pair[0], 16); }) == "");
  thread.join();
  CHECK(other == "");
}

TEST_CASE("a rank whose group has ended says why to one that waits, whose group ends alike") {
  Pair pair;
  Pair::begin(pair[0], 4);
  pair[1].failures().fail("rank 1 has had enough");
  CHECK(pair.poll(0, 2) == "rank 1 has had enough");
  CHECK_THROWS_AS(pair[0].failures().throw_if_failed(), c10::DistBackendError);
}

TEST_CASE("a store that is gone ends a wait, with the rank whose connection is closed") {
  Pair pair;
  Pair::begin(pair[0], 4);
  pair.store.close_connections_of(1);
  pair.store.die();
  CHECK(pair.poll(0, 2) ==
        "rank 1 closed its connection in step 1 of call; the group cannot be used any more");
}

TEST_CASE("a rank that dies while others compare a new call is named long before the timeout") {
  Pair pair;
  pair.store.close_connections_of(1);
  const auto start = std::chrono::steady_clock::now();
  CHECK(Pair::said([&] { Pair::begin(pair[0], 16); }) ==
        "rank 1 closed its connection in step 0 of call; the group cannot be used any more");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(40));
}

TEST_CASE("an interrupt leaves the wait as what it is, ends the group and is heard by peers") {
  Pair pair;
  for (const int64_t rank : {0, 1}) Pair::begin(pair[rank], 4);
  set_interrupt_check([] { throw std::runtime_error("Ctrl-C"); });
  CHECK(pair.poll(0, 2) == "Ctrl-C");
  set_interrupt_check(nullptr);
  CHECK(pair.poll(1, 2) ==
        "rank 0 was interrupted in step 1 of call; the group cannot be used any more");
}

TEST_CASE("a wait is reported once at first, then every six times as long") {
  WaitReport report(milliseconds(10));
  std::string dues;
  for (int waited = 0; waited <= 140; ++waited) {
    if (report.due(milliseconds(waited))) dues += std::to_string(waited) + " ";
  }
  CHECK(dues == "10 60 120 ");
  report.restart();
  CHECK(report.due(milliseconds(10)));
}

TEST_CASE("ranks are named once each, in order") {
  CHECK(one_of({2}) == "rank 2");
  CHECK(one_of({3, 1, 3, 1}) == "rank 1 or rank 3");
}

TEST_CASE("a blocking wait is woken again and again while it lasts, and not after") {
  struct Counter : Wakeable {
    void wake() override { ++times; }
    std::atomic<int> times{0};
  } counter;
  {
    const WaitTicker::Registration ticks(counter);
    for (int looks = 0; counter.times < 3 && looks < 5000; ++looks) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK(counter.times >= 3);
  }
  const int after = counter.times;
  std::this_thread::sleep_for(3 * WaitTicker::kPeriod);
  CHECK(counter.times == after);
}
