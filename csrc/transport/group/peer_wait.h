// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/environment.h"
#include "core/export.h"
#include "transport/group/rendezvous.h"

namespace ringattn {

/// When to log that a rank waits: RINGATTN_WAIT_REPORT_S seconds after the wait began (10 by
/// default), then every six times as long.
class RINGATTN_API WaitReport {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit WaitReport(Milliseconds first = environment().wait_report);
  /// Whether a line is due after a wait of `waited`.
  bool due(Milliseconds waited);
  void restart() { next_ = first_; }

  /// Logs one line: "rank 0 has waited 10 s for rank 1 in step 2 of ring_forward".
  static void log(int64_t rank, const std::vector<int64_t>& peers, const std::string& place,
                  Milliseconds waited);

 private:
  Milliseconds first_, next_;
};

/// A host thread's wait for other ranks. The thread calls poll() every 50 to 200 ms while the wait
/// lasts. Used by one thread.
class RINGATTN_API PeerWait {
 public:
  using Clock = std::chrono::steady_clock;

  /// `rendezvous` must outlive the wait. `operation`: for log lines and errors; empty: the operator
  /// of the call.
  PeerWait(const Rendezvous& rendezvous, int64_t call, int64_t step, std::vector<int64_t> peers,
           std::string operation = "");

  /// The wait is for what peers publish in the store, so that a closed connection does not end it.
  void test_connections() { tests_connections_ = true; }
  /// Throws where what is waited for will not come: a peer has refused or left the call, has
  /// another signature, or has ended the group; its connection is closed; this group has failed;
  /// the user has pressed Ctrl-C, which ends the group. Logs from time to time that this rank
  /// waits.
  void poll();
  /// Ends the group: the user has pressed Ctrl-C.
  void interrupt();
  /// Whether the wait has taken as long as a rank waits (Rendezvous::patience).
  bool expired() const;
  /// Waits for other ranks from now on, since the same time.
  void set_peers(std::vector<int64_t> peers) { peers_ = std::move(peers); }
  /// "step 2 of ring_forward".
  std::string place() const;

 private:
  const Rendezvous& rendezvous_;
  const int64_t call_, step_;
  std::vector<int64_t> peers_;
  const std::string operation_;
  bool tests_connections_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point next_look_ = start_;
  std::chrono::milliseconds next_check_{500};  // of connections, after so long a wait
  WaitReport report_;
};

}  // namespace ringattn
