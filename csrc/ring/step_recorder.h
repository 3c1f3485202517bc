// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/export.h"

// Timings of ring calls, step by step. Off, the recorder costs one test of a flag per call.

namespace ringattn {

/// The timing of one launch: of one block, or of several, named by the first.
struct StepTiming {
  int64_t call = 0;           // 0, 1, ...: ring calls since recording began
  int64_t source = 0;         // the rank that owns the block
  bool own = false;           // the block was this rank's own
  bool backward = false;      // of a ring's backward
  double attention_ms = 0.0;  // 0 where nothing was visible
  double transfer_ms = 0.0;   // from the start of the block's transfer to its arrival
  double wait_ms = 0.0;       // how long the stream waited: for the block, and for gradients
  double flops = 0.0;         // operations of the attention
};

/// A point in time of the current stream (an accelerator) or of this thread (CPU).
class EventTimer {
 public:
  explicit EventTimer(c10::Device device);
  /// Milliseconds from this point to `later`; waits for the stream to reach it.
  double until(const EventTimer& later) const;

 private:
  std::shared_ptr<c10::Event> event_;  // null on CPU
  std::chrono::steady_clock::time_point time_;
};

/// Collects the timings of this process's ring calls while recording is on. Thread-safe.
class RINGATTN_API Recorder {
 public:
  static Recorder& get();

  /// `by_block`: calls use LaunchPlan::kPerBlock, so that each block is timed; otherwise their own
  /// plan.
  void start(bool by_block);
  /// Ends recording and waits for the streams. Returns the timings since start().
  std::vector<StepTiming> stop();
  bool on() const { return on_; }
  bool by_block() const { return by_block_; }

  /// Returns the number of a ring call that begins.
  int64_t begin_call() { return num_calls_++; }
  /// Adds the steps of a call; stop() calls them for their timings.
  void add(std::vector<std::function<StepTiming()>> steps);

 private:
  std::atomic<bool> on_{false};
  std::atomic<bool> by_block_{true};
  std::atomic<int64_t> num_calls_{0};
  std::mutex mutex_;  // guards pending_
  std::vector<std::function<StepTiming()>> pending_;
};

/// Times the launches of one ring call while recording is on; off, it does nothing.
class CallTimer {
 public:
  explicit CallTimer(c10::Device device);
  bool on() const { return on_; }
  /// Whether each block is to be timed by itself.
  bool by_block() const { return on_ && Recorder::get().by_block(); }

  /// For each launch: before it waits for its blocks, once it has them, and after it. Where it
  /// waits for more after its attention, end_attention() comes before that.
  void begin_launch();
  void begin_attention();
  void end_attention();
  /// `timing`: all of it but the number of the call and the times. `transfer_ms` is called when
  /// recording ends; empty: 0.
  void end_launch(StepTiming timing, std::function<double()> transfer_ms);
  /// Hands the timings to the recorder. Those of a call that fails are dropped: they may hold its
  /// stream.
  void finish();

 private:
  const c10::Device device_;
  const bool on_;
  const int64_t call_;
  std::optional<EventTimer> launch_, attention_, attended_;
  std::vector<std::function<StepTiming()>> steps_;
};

}  // namespace ringattn
