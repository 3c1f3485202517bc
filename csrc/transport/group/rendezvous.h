// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/export.h"

// What a transport is made from. It depends on nothing else of the group that makes it.

namespace ringattn {

/// The call of a wait outside of the numbered calls.
constexpr int64_t kOutsideCalls = -1;

/// What a transport needs to know of the calls that it carries: their tags, whether a wait is in
/// vain, and which rank is to blame for that. Outlives the transport. The tags belong to the thread
/// that makes the calls; all else is thread-safe where noted.
class RINGATTN_API CallMonitor {
 public:
  using Ranks = std::vector<int64_t>;
  virtual ~CallMonitor() = default;

  /// The tag of messages at `step` of the latest call: the same on all ranks, and another one for
  /// calls that differ. Not negative.
  virtual int32_t message_tag(int64_t step) const = 0;
  /// A hash of the latest call's signature: the same on all ranks and in every call with this
  /// signature, and another one for other calls. A captured call may be replayed beside one that is
  /// not. Not negative.
  virtual int32_t call_tag() const = 0;
  /// The operator of a recent call.
  virtual std::string operation(int64_t call) const = 0;

  /// Reads what `peers` have published, and publishes this rank's signature of `call`. Throws
  /// CallLeft where a peer has refused or left the call or has another signature; ends the group
  /// where a peer has ended it, or where the store is gone. `place`: where this rank waits.
  virtual void check_peers(int64_t call, const Ranks& peers, const std::string& place) = 0;
  /// Ends the group, and throws, where the connection to one of `peers` is closed.
  virtual void check_connections(const Ranks& peers, const std::string& place) = 0;
  /// Why the group has ended on one of `peers`, or, on a device, why one does not take part in what
  /// this rank has launched up to `call`: then the group must end here, too. Thread-safe.
  virtual std::optional<std::string> ended_by(int64_t call, const Ranks& peers) = 0;
  /// Why one of `peers` refused the call that this rank makes next, which a peer may make in place
  /// of a replay that this rank is in: then the group must end here, too. Thread-safe.
  virtual std::optional<std::string> refused_next(const Ranks& peers) = 0;
  /// Throws: the connection to `peer` failed for `reason` in `place` of `call`. Ends the group,
  /// unless the peer has left the call.
  virtual void lose(int64_t call, int64_t peer, const std::string& place,
                    const std::string& reason) = 0;

  /// A sentence: which rank is to blame that a message of `call` did not get through in `place`.
  /// Reads from the store which other ranks have failed. `suspects`: the ranks that this rank was
  /// exchanging with. Thread-safe.
  virtual std::string blame(int64_t call, const std::string& place, const Ranks& suspects,
                            const std::string& reason) = 0;
  /// The same, at `step` of a ring.
  std::string blame(int64_t call, int64_t step, const Ranks& suspects, const std::string& reason) {
    return blame(call, "step " + std::to_string(step) + " of the ring", suspects, reason);
  }
  /// Ends the group: every later call throws `message`, and peers that wait for this rank read it.
  /// Thread-safe.
  virtual void fail(const std::string& message) = 0;
  virtual void throw_if_failed() = 0;
};

/// The ranks that make a transport together: a whole process group, or any subset of one. Ranks
/// count from 0 among them.
struct RINGATTN_API Rendezvous {
  int64_t rank = 0;
  int64_t size = 1;
  std::chrono::milliseconds timeout{};  // how long a rank may keep the others waiting
  /// Collective: the strings of all ranks, by rank. A rank that does not take part ends the group.
  /// Called by the thread that makes the calls, while the owner of the transport lives.
  std::function<std::vector<std::string>(const std::string& mine)> exchange = nullptr;
  std::shared_ptr<CallMonitor> calls = nullptr;

  /// How long a rank waits: by the end of the timeout, all ranks know which one is missing.
  std::chrono::milliseconds patience() const { return timeout * 4 / 5; }
  std::vector<int64_t> others() const;  // the ranks beside this one, ascending
};

/// "rank 1", or "rank 1 or rank 2": each rank once.
RINGATTN_API std::string one_of(std::vector<int64_t> ranks);

/// The text of an error, without a C++ stack.
RINGATTN_API std::string reason_of(const std::exception& error);

}  // namespace ringattn
