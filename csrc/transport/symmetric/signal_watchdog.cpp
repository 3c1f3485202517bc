// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/signal_watchdog.h"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/runtime/watchdog.h"

namespace ringattn {

SignalWatchdog::SignalWatchdog(const Rendezvous& rendezvous,
                               std::shared_ptr<WatchedSignals> signals,
                               std::function<Clock::time_point()> now)
    : rank_(rendezvous.rank),
      monitor_(rendezvous.calls),
      signals_(std::move(signals)),
      others_(rendezvous.others()),
      patience_(rendezvous.patience()),
      now_(std::move(now)) {}

bool SignalWatchdog::poll() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return true;
  const uint32_t phase = signals_->phase(), calls = signals_->calls();
  const bool moved = phase != last_phase_ || calls != last_calls_;
  const bool waits = Phase::decode(phase).kind != Phase::kNotWaiting;
  last_phase_ = phase;
  last_calls_ = calls;
  if (moved || !waits) restart();
  if (given_up_) {
    constexpr auto kAgain = std::chrono::milliseconds(500);
    signals_->give_up();
    if (moved || now_() - released_ >= kAgain) release();
  } else if (const auto mismatch = signals_->call_mismatch()) {
    end_for(*mismatch);
  } else if (waits && now_() - since_ >= patience_) {
    give_up(Phase::decode(phase));
  } else if (waits) {
    check_peers(Phase::decode(phase));
  }
  return false;
}

void SignalWatchdog::check_mismatch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || given_up_) return;
  if (const auto mismatch = signals_->call_mismatch()) end_for(*mismatch);
}

// Ends the group where a peer has refused the call or has ended its own; reports a wait that is
// due.
void SignalWatchdog::check_peers(Phase phase) {
  constexpr auto kFirst = std::chrono::milliseconds(100);
  const auto now = now_();
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
  if (waited < kFirst || now < next_check_) return;
  next_check_ = now + std::clamp(waited / 20, kFirst, 5 * kFirst);
  auto monitor = monitor_.lock();
  if (!monitor) return;
  auto why = monitor->ended_by(call_, others_);
  if (!why && captured_) why = refused_in_replay(*monitor, phase);
  if (!why && report_.due(waited)) {
    std::vector<int64_t> late = others_;
    if (phase.in_host_memory()) {  // not worth a call of the device
      late = late_ranks(phase, signals_->progress(phase.kind));
    }
    const int64_t step = step_of_rank_ && !late.empty() ? (*step_of_rank_)[late.front()] : 1;
    if (!late.empty()) {
      WaitReport::log(rank_, late, "step " + std::to_string(step) + " of the ring", waited);
    }
  }
  // This may be the last reference, and the group's destructor takes this object's lock.
  Watchdog::get().defer_free(std::move(monitor));
  if (why) end([&](CallMonitor&) { return *why; });
}

// The host does not see replays: this wait may be in one that a peer refuses to take part in. A
// peer that has launched the same replay may have refused its next call, too. Its signals come,
// unless its device is far behind.
std::optional<std::string> SignalWatchdog::refused_in_replay(CallMonitor& monitor, Phase phase) {
  constexpr auto kBehind = std::chrono::milliseconds(1000);
  if (!monitor.refused_next(others_)) {
    refused_since_.reset();
    return {};
  }
  if (!refused_since_) refused_since_ = now_();
  if (now_() - *refused_since_ < kBehind) return {};
  const auto reached = progress(phase);
  return monitor.refused_next(reached ? late_ranks(phase, *reached) : others_);
}

std::vector<int64_t> SignalWatchdog::late_ranks(Phase phase,
                                                const std::vector<uint32_t>& reached) const {
  std::vector<int64_t> late = others_;
  const auto is_done = [&](int64_t rank) { return reached[rank] >= phase.least; };
  late.erase(std::remove_if(late.begin(), late.end(), is_done), late.end());
  return late;
}

void SignalWatchdog::end_for(const WatchedSignals::CallMismatch& mismatch) {
  end([&](CallMonitor&) {
    const std::string other = "rank " + std::to_string(mismatch.rank);
    const std::string what =
        mismatch.reported_by_peer
            ? "and " + other + " has seen one in another call"
            : "got another one on " + other + " than on rank " + std::to_string(rank_);
    return "ranks must make the same calls in the same order, " + what +
           "; the group cannot be used any more";
  });
}

void SignalWatchdog::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

void SignalWatchdog::describe(int64_t call,
                              std::shared_ptr<const std::vector<int64_t>> step_of_rank,
                              bool captured) {
  const std::lock_guard<std::mutex> lock(mutex_);
  call_ = call;
  captured_ |= captured;
  step_of_rank_ = std::move(step_of_rank);
}

bool SignalWatchdog::all_read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (given_up_) return true;
  const auto read = progress({Phase::kUntilRead, 1});
  const auto mirror = progress({Phase::kStreamUntilRead, 1});
  const auto has_read = [&](int64_t rank) {
    return read && mirror && (*read)[rank] != 0 && (*mirror)[rank] != 0;
  };
  if (std::all_of(others_.begin(), others_.end(), has_read)) return true;
  if (!leaving_since_) leaving_since_ = now_();
  return now_() - *leaving_since_ >= patience_;
}

void SignalWatchdog::restart() {
  since_ = now_();
  report_.restart();
  suspected_ = false;
  refused_since_.reset();
  silent_since_.reset();
}

void SignalWatchdog::give_up(Phase phase) {
  std::vector<int64_t> suspects = others_;
  const auto asked = now_();
  if (const auto reached = progress(phase)) {
    silent_since_.reset();
    suspects = late_ranks(phase, *reached);
    // No signal is missing: the wait has ended since, or is of a call whose kernel has not begun.
    if (suspects.empty()) return restart();
    // The next poll must find late ranks too: a call that begins clears its signals.
    if (!std::exchange(suspected_, true)) return;
  } else {
    // The device does not answer, perhaps because of the kernel that waits there, and then for
    // ever.
    if (!silent_since_) silent_since_ = asked;
    if (now_() - *silent_since_ < device_timeout()) return;
  }
  end([&](CallMonitor& monitor) {
    const int64_t step = step_of_rank_ ? (*step_of_rank_)[suspects.front()] : 1;
    return monitor.blame(call_, step, suspects, "no signal came through shared memory");
  });
}

void SignalWatchdog::end(const std::function<std::string(CallMonitor&)>& why) {
  if (auto monitor = monitor_.lock()) {
    monitor->fail(why(*monitor));
    // This may be the last reference, and the group's destructor takes this object's lock.
    Watchdog::get().defer_free(std::move(monitor));
  }
  given_up_ = true;
  signals_->give_up();
  release();
}

// Nothing where the device does not answer.
std::optional<std::vector<uint32_t>> SignalWatchdog::progress(Phase phase) {
  const Phase::Kind kind = phase.kind;
  if (phase.in_host_memory()) return signals_->progress(kind);
  const auto reached = std::make_shared<std::vector<uint32_t>>();
  const auto ask = [signals = signals_, kind, reached] { *reached = signals->progress(kind); };
  if (!asking_.run(device_timeout(), ask)) return {};
  return std::move(*reached);
}

void SignalWatchdog::release() {
  if (asking_.run(device_timeout(), [signals = signals_] { signals->release(); }))
    released_ = now_();
}

// How long to wait for the device: this thread watches other operations too.
std::chrono::milliseconds SignalWatchdog::device_timeout() const {
  return std::min(patience_ / 16, std::chrono::milliseconds(1000));
}

}  // namespace ringattn
