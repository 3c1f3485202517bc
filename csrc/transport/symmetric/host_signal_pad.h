// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/export.h"
#include "peer_sync/protocol.h"
#include "transport/symmetric/signal_watchdog.h"

namespace ringattn {

/// The signal pad of one rank in host memory that all ranks and their devices map: the mirrors that
/// streams wait for (peer_sync/protocol.h), and what the device shows its watchdog. The watchdog
/// reads and sets them without the device: under MPS, for one, a process has so few queues that no
/// operation which it asks of the device may get past a stream that waits.
struct HostSignalPad {
  using Signal = std::atomic<uint32_t>;
  static_assert(sizeof(Signal) == sizeof(uint32_t) && Signal::is_always_lock_free);
  static constexpr int64_t kMaxRanks = PeerSignals::kMaxPeers;

  // Written by this rank's device, read by its watchdog.
  Signal phase{Phase{}.encoded()};  // what is waited for
  Signal calls{0};                  // staging kernels: one of each call, several of a round
  Signal mismatch{0};               // CallTags::mismatch
  Signal call_tag{0};               // of the call in which a stream waits, or waited last
  // Written by its host.
  Signal given_up{0};
  // Written by the rank of the index; a rank's own are not used.
  Signal staged_mirror[kMaxRanks] = {};  // the tag of the call
  Signal read_mirror[kMaxRanks] = {};    // 1
};

/// The host pads of all ranks, as one of them sees them.
class RINGATTN_API HostSignalPads {
 public:
  HostSignalPads(std::vector<HostSignalPad*> pads, int64_t rank);

  HostSignalPad& of(int64_t rank) const { return *pads_[rank]; }
  HostSignalPad& own() const { return of(rank_); }

  // As in WatchedSignals, for signals in host memory.
  std::vector<uint32_t> progress(Phase::Kind kind) const;
  std::optional<WatchedSignals::CallMismatch> call_mismatch() const;
  void give_up();

 private:
  std::vector<HostSignalPad*> pads_;
  int64_t rank_;
};

}  // namespace ringattn
