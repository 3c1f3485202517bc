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
#include "transport/runtime/bounded_task.h"

namespace ringattn {

class RingGroup;

/// What a kernel or a stream is waiting for: words of one kind that are not as large yet.
struct Phase {
  enum Kind : uint32_t {
    kNotWaiting = 0,
    kUntilRead = 1,  // a kernel: words of device memory
    kUntilStaged = 2,
    kUntilTold = 3,        // a kernel: those of host memory that say the same to streams
    kStreamUntilRead = 4,  // words of host memory
    kStreamUntilStaged = 5,
  };
  Kind kind = kNotWaiting;
  uint32_t least = 0;

  constexpr bool in_host_memory() const { return kind >= kUntilTold; }

  // In one word, which the device writes and the watchdog reads.
  static constexpr uint32_t kKinds = 8;
  constexpr uint32_t word() const { return kKinds * least + kind; }
  static constexpr Phase from(uint32_t word) {
    return {static_cast<Kind>(word % kKinds), word / kKinds};
  }
};

/// The words by which a rank's kernels and streams wait for other ranks, for who watches over that.
/// Thread-safe.
class WatchedWords {
 public:
  virtual ~WatchedWords() = default;

  /// What is waited for (Phase::word), and how many calls have begun. At once.
  virtual uint32_t phase() const = 0;
  virtual uint32_t calls() const = 0;
  /// How far each rank has come with what is waited for, [W]. For words of device memory it asks
  /// the device, which may not answer; for others, at once.
  virtual std::vector<uint32_t> come(Phase::Kind kind) = 0;
  /// A rank in a call of another kind than this rank's.
  struct Unlike {
    int64_t rank = 0;
    bool heard = false;  // it is not in one, but has seen another rank that is
  };
  /// One that a kernel has seen, or that a stream waits for. At once.
  virtual std::optional<Unlike> unlike_seen() const = 0;
  /// Tells kernels that their waits are in vain, and lets streams pass: calls that the host made
  /// before it knew are still to come, and it is done again and again. At once.
  virtual void give_up() = 0;
  /// The same for all that waits for device memory. What it computes is NaN. Asks the device.
  virtual void release() = 0;
};

/// Sees to it that waits for other ranks come to an end: where one takes the group's timeout it
/// ends the group, names who did not come, and has everything pass. So it does where a rank is in
/// another call. Thread-safe.
class RINGATTN_API SignalWatch {
 public:
  using Clock = std::chrono::steady_clock;

  SignalWatch(RingGroup& group, std::shared_ptr<WatchedWords> words,
              std::function<Clock::time_point()> now = &Clock::now);

  /// Called many times a second, from the watchdog's thread. Whether there is nothing to look at
  /// any more.
  bool look();
  /// The part of it that needs no answer to judge, from any thread: ends the group where a rank has
  /// been seen in another call.
  void notice();
  /// There is not.
  void close();

  /// For errors: the number of the latest call, and the step at which the block of each rank visits
  /// in it.
  void describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank);

  /// Whether the other ranks have read everything that this one has staged, or will not any more.
  bool all_read();

 private:
  void watch_anew();
  void look_for_news(Phase phase);
  void give_up(Phase phase);
  void end_for(const WatchedWords::Unlike& unlike);
  void end(const std::function<std::string(RingGroup&)>& why);
  std::optional<std::vector<uint32_t>> look_at(Phase phase);
  void release();
  std::chrono::milliseconds soon() const;

  const std::weak_ptr<RingGroup> group_;
  const std::shared_ptr<WatchedWords> words_;
  const std::vector<int64_t> others_;
  const std::chrono::milliseconds patience_;
  const std::function<Clock::time_point()> now_;

  std::mutex mutex_;  // guards what follows
  int64_t call_ = 0;
  std::shared_ptr<const std::vector<int64_t>> step_of_rank_;
  bool closed_ = false, given_up_ = false;
  uint32_t last_phase_ = Phase{}.word(), last_calls_ = 0;
  Clock::time_point since_ = now_();                // nothing has moved, or nobody waits
  Clock::time_point next_look_ = since_;            // at what peers have published
  WaitReport report_;                               // of a wait since since_
  bool suspected_ = false;                          // somebody, by the last look
  std::optional<Clock::time_point> silent_since_;   // the device does not answer
  std::optional<Clock::time_point> leaving_since_;  // the group is gone, and not all has been read
  Clock::time_point released_;                      // what waits, last; long ago: never
  Errand asking_;                                   // the device
};

}  // namespace ringattn
