// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/host_signal_pad.h"

#include <utility>

namespace ringattn {

HostSignals::HostSignals(std::vector<HostWords*> of_ranks, int64_t rank)
    : of_ranks_(std::move(of_ranks)), rank_(rank) {}

std::vector<uint32_t> HostSignals::come(Phase::Kind kind) const {
  const HostWords& words = own();
  std::vector<uint32_t> come;
  for (size_t rank = 0; rank < of_ranks_.size(); ++rank) {
    const uint32_t staged = words.staged[rank];
    come.push_back(kind == Phase::kStreamUntilRead ? words.read[rank].load()
                   : kind == Phase::kUntilTold     ? staged != 0
                                                   : staged == words.kind);
  }
  return come;
}

std::optional<WatchedWords::Unlike> HostSignals::unlike_seen() const {
  const HostWords& words = own();
  if (const uint32_t seen = words.unlike) {
    // By its place among the others.
    const int64_t place = (seen - 1) % HostWords::kRanks;
    return WatchedWords::Unlike{place + (place >= rank_ ? 1 : 0), seen > HostWords::kRanks};
  }
  const uint32_t calls = words.calls, phase = words.phase, kind = words.kind;
  if (Phase::from(phase).kind != Phase::kStreamUntilStaged) return {};
  for (size_t rank = 0; rank < of_ranks_.size(); ++rank) {
    const uint32_t staged = words.staged[rank];
    if (staged == 0 || staged == kind) continue;
    // Nobody stages for the next call before this one is over, but it may be by now.
    if (words.phase != phase || words.staged[rank] != staged) return {};
    if (words.kind != kind || words.calls != calls) return {};
    return WatchedWords::Unlike{static_cast<int64_t>(rank), staged == kNoCall};
  }
  return {};
}

void HostSignals::give_up() {
  HostWords& words = own();
  words.given_up = kGivenUp;  // first: who passes must know
  for (size_t rank = 0; rank < of_ranks_.size(); ++rank) {
    words.staged[rank] = words.kind.load();
    words.read[rank] = 1;
  }
}

}  // namespace ringattn
