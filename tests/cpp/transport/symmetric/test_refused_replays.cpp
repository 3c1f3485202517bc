// SPDX-License-Identifier: Apache-2.0
// A peer that refuses its next call while this rank replays a CUDA graph.
#include <memory>
#include <string>

#include "catch.h"
#include "transport/group/group_context.h"
#include "transport/symmetric/signal_watchdog.h"
#include "watched_signals.h"

using namespace ringattn::testing;
using ringattn::GroupContext;
using ringattn::Phase;

namespace {

const std::string kRefused =
    "rank 2 refused a call while other ranks replay a CUDA graph: q must be good, got bad; the "
    "group cannot be used any more";

// Rank 0 of three has been in calls 0 and 1; the second one was captured, or was not.
struct Replaying : Watched {
  explicit Replaying(bool captured = true) {
    peer.refuse_call("ringattn: one that all ranks refused, two calls ago");
    group->refuse_call("ringattn: one that all ranks refused, two calls ago");
    peer.refuse_call("ringattn: another one, in which this rank was captured");
    group->refuse_call("ringattn: another one, in which this rank was captured");
    store.remove("call/1/2");
    watch.describe(1, steps({0, 1, 2}), captured);
  }

  GroupContext peer{std::make_unique<FakeBackend>(store, 2, 3, kTimeout)};
};

}  // namespace

TEST_CASE("a peer that refuses its next call ends the wait in a replay within two seconds") {
  for (const bool waits_in_host_memory : {false, true}) {
    Replaying watched;
    watched.signals->staged = {0, 9, 5};
    watched.signals->staged_mirror = {0, 1, 0};
    watched.wait_for_heads(9);
    if (waits_in_host_memory) {
      watched.signals->shown_phase = Phase{Phase::kStreamUntilStaged, 1}.encoded();
      watched.poll_after(milliseconds(1));
    }
    watched.poll_after(milliseconds(2000));  // the call before, which all ranks refused, is past
    CHECK(watched.failure().empty());
    watched.peer.refuse_call("ringattn: q must be good, got bad");
    watched.poll_after(milliseconds(600));
    CHECK(watched.failure().empty());
    watched.poll_after(milliseconds(1100));
    CHECK(watched.failure() == kRefused);
    CHECK(watched.signals->given_up);
    CHECK(watched.signals->releases == 1);
  }
}

TEST_CASE("a peer that has taken part in the replay may refuse its next call") {
  Replaying watched;
  watched.signals->staged = {0, 5, 9};
  watched.wait_for_heads(9);
  watched.peer.refuse_call("ringattn: q must be good, got bad");
  for (int times = 0; times < 4; ++times) watched.poll_after(milliseconds(1100));
  CHECK(watched.failure().empty());
}

TEST_CASE("a peer whose device comes to the replay within a second may refuse its next call") {
  Replaying watched;
  watched.signals->staged = {0, 9, 5};
  watched.peer.refuse_call("ringattn: q must be good, got bad");
  for (int replays = 0; replays < 4; ++replays) {
    watched.wait_for_heads(9);
    watched.poll_after(milliseconds(600));
  }
  CHECK(watched.failure().empty());
}

TEST_CASE("where nothing was captured a refusal of the next call ends no group") {
  Replaying watched(/*captured=*/false);
  watched.wait_for_heads(9);
  watched.peer.refuse_call("ringattn: q must be good, got bad");
  for (int times = 0; times < 4; ++times) watched.poll_after(milliseconds(1100));
  CHECK(watched.failure().empty());
}

TEST_CASE("a device that does not answer has taken part in no replay") {
  Replaying watched;
  watched.signals->answers = false;
  watched.wait_for_heads(9);
  watched.peer.refuse_call("ringattn: q must be good, got bad");
  watched.poll_after(milliseconds(200));
  watched.poll_after(milliseconds(1100));
  CHECK(watched.failure() == kRefused);
  CHECK(watched.signals->given_up);
}
