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

/// Words of one rank in host memory that all ranks and their devices see: what its device shows its
/// watchdog, and what its streams wait for. The watchdog reads and sets them without the device:
/// under MPS, for one, a process has so few queues that nothing which it asks of the device may get
/// past a stream that waits.
struct HostWords {
  using Word = std::atomic<uint32_t>;
  static_assert(sizeof(Word) == sizeof(uint32_t) && Word::is_always_lock_free);
  static constexpr int64_t kRanks = Notices::kMaxPeers;

  // Set by this rank's device.
  Word phase{Phase{}.word()};  // what is waited for
  Word calls{0};               // that have been staged
  Word unlike{0};              // CallTags::unlike
  Word kind{0};                // of the call in which a stream waits, or did last
  // Set by its host.
  Word given_up{0};
  // Set by the rank in whose place they are; its own are not used.
  Word staged[kRanks] = {};  // everything, for a call of this kind; taken back to 0
  Word read[kRanks] = {};    // what this rank has staged; 1 or, taken back, 0
};

/// What one rank sees in the words of all, and says there.
class RINGATTN_API HostSignals {
 public:
  HostSignals(std::vector<HostWords*> of_ranks, int64_t rank);

  HostWords& of(int64_t rank) const { return *of_ranks_[rank]; }
  HostWords& own() const { return of(rank_); }

  // As WatchedWords has them, for words of host memory.
  std::vector<uint32_t> come(Phase::Kind kind) const;
  std::optional<WatchedWords::Unlike> unlike_seen() const;
  void give_up();

 private:
  std::vector<HostWords*> of_ranks_;
  int64_t rank_;
};

}  // namespace ringattn
