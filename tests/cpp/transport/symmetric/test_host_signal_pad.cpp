// SPDX-License-Identifier: Apache-2.0
// The signal pads in host memory, as the host of one rank sees them.
#include <cstdint>
#include <optional>
#include <vector>

#include "catch.h"
#include "transport/symmetric/host_signal_pad.h"

using ringattn::HostSignalPad;
using ringattn::HostSignalPads;
using ringattn::kGivenUp;
using ringattn::kMismatchTag;
using ringattn::Phase;
using ringattn::WatchedSignals;

namespace {

constexpr uint32_t kTag = 77, kOtherTag = 78;

// Three ranks, as rank 1 sees them.
struct Ranks {
  HostSignalPad pads[3];
  HostSignalPads view{{&pads[0], &pads[1], &pads[2]}, 1};
  HostSignalPad& own = pads[1];

  void wait(Phase::Kind kind) { own.phase = Phase{kind, 1}.encoded(); }
};

bool is(const std::optional<WatchedSignals::CallMismatch>& mismatch, int64_t rank,
        bool reported_by_peer) {
  return mismatch && mismatch->rank == rank && mismatch->reported_by_peer == reported_by_peer;
}

}  // namespace

TEST_CASE("progress: peers that have staged under this tag, and peers that have read") {
  Ranks ranks;
  ranks.own.call_tag = kTag;
  ranks.own.staged_mirror[0] = kTag;
  ranks.own.staged_mirror[2] = kOtherTag;
  ranks.own.read_mirror[2] = 1;
  CHECK(ranks.view.progress(Phase::kStreamUntilStaged) == std::vector<uint32_t>{1, 0, 0});
  CHECK(ranks.view.progress(Phase::kStreamUntilRead) == std::vector<uint32_t>{0, 0, 1});
  CHECK(ranks.view.progress(Phase::kUntilMirrored) == std::vector<uint32_t>{1, 0, 1});
}

TEST_CASE("a peer that has staged under another tag is a mismatch, or has reported one") {
  Ranks ranks;
  ranks.own.call_tag = kTag;
  ranks.own.staged_mirror[0] = kTag;
  ranks.wait(Phase::kStreamUntilStaged);
  CHECK_FALSE(ranks.view.call_mismatch());
  ranks.own.staged_mirror[2] = kOtherTag;
  CHECK(is(ranks.view.call_mismatch(), 2, false));
  ranks.own.staged_mirror[2] = kMismatchTag;
  CHECK(is(ranks.view.call_mismatch(), 2, true));
}

TEST_CASE("a peer that is not waited for may be in its next call") {
  Ranks ranks;
  ranks.own.call_tag = kTag;
  ranks.own.staged_mirror[0] = kOtherTag;
  for (const auto kind :
       {Phase::kNotWaiting, Phase::kUntilRead, Phase::kUntilStaged, Phase::kStreamUntilRead}) {
    ranks.wait(kind);
    CHECK_FALSE(ranks.view.call_mismatch());
  }
}

TEST_CASE("a mismatch that a kernel reports is an index among the peers") {
  Ranks ranks;
  ranks.own.mismatch = 1;
  CHECK(is(ranks.view.call_mismatch(), 0, false));
  ranks.own.mismatch = 2;
  CHECK(is(ranks.view.call_mismatch(), 2, false));
  ranks.own.mismatch = 2 + HostSignalPad::kMaxRanks;
  CHECK(is(ranks.view.call_mismatch(), 2, true));
}

TEST_CASE("giving up sets all signals of this rank's pad, and no peer's") {
  Ranks ranks;
  ranks.own.call_tag = kTag;
  ranks.view.give_up();
  CHECK(ranks.own.given_up == kGivenUp);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(ranks.own.staged_mirror[rank] == kTag);
    CHECK(ranks.own.read_mirror[rank] == 1);
    CHECK(ranks.pads[0].staged_mirror[rank] == 0);
    CHECK(ranks.pads[2].read_mirror[rank] == 0);
  }
  CHECK(ranks.pads[0].given_up == 0);
}
