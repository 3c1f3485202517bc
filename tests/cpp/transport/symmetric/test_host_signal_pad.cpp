// SPDX-License-Identifier: Apache-2.0
// What ranks say to each other in host memory, seen by the host of one of them.
#include <cstdint>
#include <optional>
#include <vector>

#include "catch.h"
#include "transport/symmetric/host_signal_pad.h"

using ringattn::HostSignals;
using ringattn::HostWords;
using ringattn::kGivenUp;
using ringattn::kNoCall;
using ringattn::Phase;
using ringattn::WatchedWords;

namespace {

constexpr uint32_t kKind = 77, kOtherKind = 78;

// Three ranks, as rank 1 sees them.
struct Ranks {
  HostWords words[3];
  HostSignals signals{{&words[0], &words[1], &words[2]}, 1};
  HostWords& own = words[1];

  void wait(Phase::Kind kind) { own.phase = Phase{kind, 1}.word(); }
};

bool is(const std::optional<WatchedWords::Unlike>& unlike, int64_t rank, bool heard) {
  return unlike && unlike->rank == rank && unlike->heard == heard;
}

}  // namespace

TEST_CASE("who has staged for a call of this kind has come, and who has read") {
  Ranks ranks;
  ranks.own.kind = kKind;
  ranks.own.staged[0] = kKind;
  ranks.own.staged[2] = kOtherKind;
  ranks.own.read[2] = 1;
  CHECK(ranks.signals.come(Phase::kStreamUntilStaged) == std::vector<uint32_t>{1, 0, 0});
  CHECK(ranks.signals.come(Phase::kStreamUntilRead) == std::vector<uint32_t>{0, 0, 1});
  CHECK(ranks.signals.come(Phase::kUntilTold) == std::vector<uint32_t>{1, 0, 1});
}

TEST_CASE("a rank that has staged for another call is seen, and one that is in none") {
  Ranks ranks;
  ranks.own.kind = kKind;
  ranks.own.staged[0] = kKind;
  ranks.wait(Phase::kStreamUntilStaged);
  CHECK_FALSE(ranks.signals.unlike_seen());
  ranks.own.staged[2] = kOtherKind;
  CHECK(is(ranks.signals.unlike_seen(), 2, false));
  ranks.own.staged[2] = kNoCall;
  CHECK(is(ranks.signals.unlike_seen(), 2, true));
}

TEST_CASE("who is not waited for may be in the next call") {
  Ranks ranks;
  ranks.own.kind = kKind;
  ranks.own.staged[0] = kOtherKind;
  for (const auto kind :
       {Phase::kNotWaiting, Phase::kUntilRead, Phase::kUntilStaged, Phase::kStreamUntilRead}) {
    ranks.wait(kind);
    CHECK_FALSE(ranks.signals.unlike_seen());
  }
}

TEST_CASE("what a kernel has seen counts the others alone") {
  Ranks ranks;
  ranks.own.unlike = 1;
  CHECK(is(ranks.signals.unlike_seen(), 0, false));
  ranks.own.unlike = 2;
  CHECK(is(ranks.signals.unlike_seen(), 2, false));
  ranks.own.unlike = 2 + HostWords::kRanks;
  CHECK(is(ranks.signals.unlike_seen(), 2, true));
}

TEST_CASE("giving up lets this rank's streams pass, whatever they wait for, and nobody else's") {
  Ranks ranks;
  ranks.own.kind = kKind;
  ranks.signals.give_up();
  CHECK(ranks.own.given_up == kGivenUp);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(ranks.own.staged[rank] == kKind);
    CHECK(ranks.own.read[rank] == 1);
    CHECK(ranks.words[0].staged[rank] == 0);
    CHECK(ranks.words[2].read[rank] == 0);
  }
  CHECK(ranks.words[0].given_up == 0);
}
