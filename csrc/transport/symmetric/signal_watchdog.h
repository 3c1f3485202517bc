// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/export.h"
#include "transport/group/peer_wait.h"
#include "transport/group/rendezvous.h"
#include "transport/runtime/bounded_task.h"

namespace ringattn {

/// What a kernel or a stream is waiting for: signals of one kind to reach a value.
struct Phase {
  enum Kind : uint32_t {
    kNotWaiting = 0,
    kUntilRead = 1,  // a kernel, signals in device memory
    kUntilStaged = 2,
    kUntilPartial = 3,     // a kernel that exchanges partials; `least` is exchange_shown()
    kUntilMirrored = 4,    // a kernel, mirrors of `staged` in host memory
    kStreamUntilRead = 5,  // a stream, mirrors in host memory
    kStreamUntilStaged = 6,
  };
  Kind kind = kNotWaiting;
  uint32_t least = 0;

  constexpr bool in_host_memory() const { return kind >= kUntilMirrored; }

  // As the 32-bit value that the device writes and the watchdog reads.
  static constexpr uint32_t kKinds = 8;
  constexpr uint32_t encoded() const { return kKinds * least + kind; }
  static constexpr Phase decode(uint32_t encoded) {
    return {static_cast<Kind>(encoded % kKinds), encoded / kKinds};
  }
};

/// The signals that a rank's kernels and streams wait for, as its watchdog reads and sets them.
/// Thread-safe. "At once": without the device, which may not answer.
class WatchedSignals {
 public:
  virtual ~WatchedSignals() = default;

  /// What is waited for (Phase::encoded), and how many staging kernels have begun. At once.
  virtual uint32_t phase() const = 0;
  virtual uint32_t calls() const = 0;
  /// The signals of this kind, one of each rank, [W]. Those in host memory at once.
  virtual std::vector<uint32_t> progress(Phase::Kind kind) = 0;
  /// A peer in another call than this rank.
  struct CallMismatch {
    int64_t rank = 0;
    bool reported_by_peer = false;  // the peer is in the same call, but has detected a mismatch
  };
  /// The mismatch that a kernel has detected, or that keeps a stream waiting. At once.
  virtual std::optional<CallMismatch> call_mismatch() const = 0;
  /// Sets given_up and the signals that streams wait for. Repeated, since calls that the host made
  /// before it knew are still to come. At once.
  virtual void give_up() = 0;
  /// Sets `failed` and the signals that kernels wait for; what they compute is NaN.
  virtual void release() = 0;
};

/// Ends waits for other ranks: where one takes the group's timeout, or where a rank is in another
/// call, it ends the group with an error that names the rank, and lets all waits pass. Thread-safe.
class RINGATTN_API SignalWatchdog {
 public:
  using Clock = std::chrono::steady_clock;

  SignalWatchdog(const Rendezvous& rendezvous, std::shared_ptr<WatchedSignals> signals,
                 std::function<Clock::time_point()> now = &Clock::now);

  /// Called many times a second by the watchdog's thread. True: it has been closed.
  bool poll();
  /// The part of poll() that needs no device, from any thread: ends the group where a rank is in
  /// another call.
  void check_mismatch();
  /// Nothing is watched any more.
  void close();

  /// For errors: the number of the latest call, and the step of each rank's block in it.
  /// `captured`: it may be replayed at any time.
  void describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank,
                bool captured = false);

  /// Whether all peers have read what this rank has staged, or will not any more.
  bool all_read();

 private:
  void restart();
  void check_peers(Phase phase);
  std::optional<std::string> refused_in_replay(CallMonitor& monitor, Phase phase);
  std::vector<int64_t> late_ranks(Phase phase, const std::vector<uint32_t>& reached) const;
  void give_up(Phase phase);
  void end_for(const WatchedSignals::CallMismatch& mismatch);
  void end(const std::function<std::string(CallMonitor&)>& why);
  std::optional<std::vector<uint32_t>> progress(Phase phase);
  void release();
  std::chrono::milliseconds device_timeout() const;

  const int64_t rank_;
  const std::weak_ptr<CallMonitor> monitor_;
  const std::shared_ptr<WatchedSignals> signals_;
  const std::vector<int64_t> others_;
  const std::chrono::milliseconds patience_;
  const std::function<Clock::time_point()> now_;

  std::mutex mutex_;  // guards what follows
  int64_t call_ = 0;
  std::shared_ptr<const std::vector<int64_t>> step_of_rank_;
  bool captured_ = false;  // any call has been
  bool closed_ = false, given_up_ = false;
  uint32_t last_phase_ = Phase{}.encoded(), last_calls_ = 0;
  Clock::time_point since_ = now_();                // of the present wait; now where nothing waits
  Clock::time_point next_check_ = since_;           // of what peers have published
  WaitReport report_;                               // of the present wait
  bool suspected_ = false;                          // the last poll found a late rank
  std::optional<Clock::time_point> refused_since_;  // a peer has refused the next call
  std::optional<Clock::time_point> silent_since_;   // the device does not answer
  std::optional<Clock::time_point> leaving_since_;  // the group is gone, and not all has been read
  Clock::time_point released_;                      // the last release(); long ago: never
  BoundedTask asking_;                              // calls of the device
};

}  // namespace ringattn
