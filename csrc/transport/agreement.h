// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/export.h"
#include "transport/peers.h"
#include "transport/signature.h"

namespace ringattn {

/// Ranks compare what they were asked to do before anything is sent, through the group's store. A
/// signature that was agreed on once costs a look-up from then on, until some call has failed here:
/// then ranks compare again, because one that refused a call goes on while others, who knew its
/// signature, may still be in it. With what it asks for, each rank says how many calls it has been
/// in: one that refused a call that the others made is out of step, and the group ends.
///
/// Calls are numbered by the group; all ranks make the same calls in the same order, refused ones
/// included, so the number alone tells which call a rank speaks of. Not thread-safe: one call at a
/// time.
class RINGATTN_API Agreement {
 public:
  /// Kinds of calls that are remembered, the oldest no longer than others. Lengths of shards make a
  /// kind, and a server sees ever new ones. All ranks forget at the same call.
  static constexpr size_t kMostAgreed = 4096;

  explicit Agreement(Peers& peers) : peers_(peers) {}

  /// Whether the ranks have agreed on this before.
  bool knows(const Signature& signature) const;
  /// Returns when all ranks ask for the same; throws on every rank when one differs, was refused
  /// its arguments, or does not come within the group's timeout.
  void join(int64_t call, const Signature& signature);
  /// Tells the others that this rank's arguments are wrong.
  void refuse(int64_t call, const std::string& message);
  /// Tells them that it failed in the middle of the call.
  void fail(int64_t call, const std::string& reason);
  /// What messages at `step` of the latest call are marked with, the same on all ranks and another
  /// one for calls that are not the same: where a transport can, it pairs only what belongs
  /// together. Not negative.
  int32_t tag(int64_t step) const;
  /// The same on all ranks for calls of the latest one's kind, and another one for other kinds:
  /// what is marked with it may be replayed, beside a call that is not. Not negative.
  int32_t kind() const;
  /// Why a rank does not take part in a call.
  struct Absence {
    bool refused = false;  // it never did; false: it failed in the middle
    std::string why;
  };
  /// What `rank` said of `call`, if it refused it or failed in it.
  std::optional<Absence> absence(int64_t call, int64_t rank);

 private:
  // A hash of the signature's text, once all ranks have asked for the same.
  uint32_t compare(int64_t call, const Signature& signature);
  void publish(int64_t call, const std::string& text);

  Peers& peers_;
  std::unordered_map<std::string, uint32_t> agreed_;  // by key of a signature: a hash of its text
  bool meet_ = false;                                 // also for what has been agreed on before
  uint32_t latest_ = 0;                               // a hash of the latest call
  uint32_t latest_kind_ = 0;                          // and of its text
  int64_t joined_ = 0;                                // calls
  std::vector<std::string> published_;                // keys of this rank that are in the store
};

}  // namespace ringattn
