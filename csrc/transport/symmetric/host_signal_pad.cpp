// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/host_signal_pad.h"

#include <utility>

namespace ringattn {

HostSignalPads::HostSignalPads(std::vector<HostSignalPad*> pads, int64_t rank)
    : pads_(std::move(pads)), rank_(rank) {}

std::vector<uint32_t> HostSignalPads::progress(Phase::Kind kind) const {
  const HostSignalPad& pad = own();
  std::vector<uint32_t> progress;
  for (size_t rank = 0; rank < pads_.size(); ++rank) {
    const uint32_t staged = pad.staged_mirror[rank];
    progress.push_back(kind == Phase::kStreamUntilRead ? pad.read_mirror[rank].load()
                       : kind == Phase::kUntilMirrored ? staged != 0
                                                       : staged == pad.call_tag);
  }
  return progress;
}

std::optional<WatchedSignals::CallMismatch> HostSignalPads::call_mismatch() const {
  const HostSignalPad& pad = own();
  if (const uint32_t reported = pad.mismatch) {
    // By its index among the peers.
    const int64_t peer = (reported - 1) % HostSignalPad::kMaxRanks;
    return WatchedSignals::CallMismatch{peer + (peer >= rank_ ? 1 : 0),
                                        reported > HostSignalPad::kMaxRanks};
  }
  const uint32_t calls = pad.calls, phase = pad.phase, call_tag = pad.call_tag;
  if (Phase::decode(phase).kind != Phase::kStreamUntilStaged) return {};
  for (size_t rank = 0; rank < pads_.size(); ++rank) {
    const uint32_t staged = pad.staged_mirror[rank];
    if (staged == 0 || staged == call_tag) continue;
    // The peer is in another call: no rank stages for the next call before this one is over. Unless
    // this call has ended while the pad was read.
    if (pad.phase != phase || pad.staged_mirror[rank] != staged) return {};
    if (pad.call_tag != call_tag || pad.calls != calls) return {};
    return WatchedSignals::CallMismatch{static_cast<int64_t>(rank), staged == kMismatchTag};
  }
  return {};
}

void HostSignalPads::give_up() {
  HostSignalPad& pad = own();
  pad.given_up = kGivenUp;  // first: a stream that passes copies it
  for (size_t rank = 0; rank < pads_.size(); ++rank) {
    pad.staged_mirror[rank] = pad.call_tag.load();
    pad.read_mirror[rank] = 1;
  }
}

}  // namespace ringattn
