// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "transport/peers.h"
#include "transport/signature.h"

namespace ringattn {

/// Ranks compare what they were asked to do before anything is sent, through the group's store. A
/// signature that was agreed on once costs a look-up from then on.
///
/// Calls are numbered by the group; all ranks make the same calls in the same order, refused ones
/// included, so the number alone tells which call a rank speaks of. Not thread-safe: one call at a
/// time.
class Agreement {
 public:
  explicit Agreement(Peers& peers) : peers_(peers) {}

  /// Whether the ranks have agreed on this before.
  bool knows(const Signature& signature) const;
  /// Returns when all ranks ask for the same; throws on every rank when one differs, was refused
  /// its arguments, or does not come within the group's timeout.
  void join(int64_t call, const Signature& signature);
  /// Tells the others that this rank's arguments are wrong.
  void refuse(int64_t call, const std::string& message);
  /// What `rank` said when it refused `call`, if it did.
  std::optional<std::string> refusal(int64_t call, int64_t rank);

 private:
  void publish(int64_t call, const std::string& text);

  Peers& peers_;
  std::unordered_set<std::string> agreed_;  // keys of signatures
  std::vector<std::string> published_;      // keys of this rank that are in the store
};

}  // namespace ringattn
