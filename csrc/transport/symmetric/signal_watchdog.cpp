// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/signal_watchdog.h"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/group/ring_group.h"
#include "transport/runtime/watchdog.h"

namespace ringattn {

SignalWatch::SignalWatch(RingGroup& group, std::shared_ptr<WatchedWords> words,
                         std::function<Clock::time_point()> now)
    : group_(group.weak_from_this()),
      words_(std::move(words)),
      others_(group.others()),
      patience_(group.peers().timeout() * 4 / 5),
      now_(std::move(now)) {}

bool SignalWatch::look() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return true;
  const uint32_t phase = words_->phase(), calls = words_->calls();
  const bool moved = phase != last_phase_ || calls != last_calls_;
  const bool waits = Phase::from(phase).kind != Phase::kNotWaiting;
  last_phase_ = phase;
  last_calls_ = calls;
  if (moved || !waits) watch_anew();
  if (given_up_) {
    constexpr auto kAgain = std::chrono::milliseconds(500);
    words_->give_up();
    if (moved || now_() - released_ >= kAgain) release();
  } else if (const auto unlike = words_->unlike_seen()) {
    end_for(*unlike);
  } else if (waits && now_() - since_ >= patience_) {
    give_up(Phase::from(phase));
  } else if (waits) {
    look_for_news(Phase::from(phase));
  }
  return false;
}

void SignalWatch::notice() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || given_up_) return;
  if (const auto unlike = words_->unlike_seen()) end_for(*unlike);
}

// Whether a peer has refused the call or has ended the group, and whether the wait is to be
// reported.
void SignalWatch::look_for_news(Phase phase) {
  constexpr auto kFirst = std::chrono::milliseconds(100);
  const auto now = now_();
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
  if (waited < kFirst || now < next_look_) return;
  next_look_ = now + std::clamp(waited / 20, kFirst, 5 * kFirst);
  auto group = group_.lock();
  if (!group) return;
  const auto why = group->ended_by(call_, others_);
  if (!why && report_.due(waited)) {
    std::vector<int64_t> late = others_;
    if (phase.in_host_memory()) {  // a device is not asked for the sake of a line
      const std::vector<uint32_t> come = words_->come(phase.kind);
      const auto is_here = [&](int64_t rank) { return come[rank] >= phase.least; };
      late.erase(std::remove_if(late.begin(), late.end(), is_here), late.end());
    }
    const int64_t step = step_of_rank_ && !late.empty() ? (*step_of_rank_)[late.front()] : 1;
    if (!late.empty()) {
      WaitReport::log(group->rank(), late, "step " + std::to_string(step) + " of the ring", waited);
    }
  }
  // This may be the last to hold it, and its end comes back here for the lock.
  Watchdog::get().free_later(std::move(group));
  if (why) end([&](RingGroup&) { return *why; });
}

void SignalWatch::end_for(const WatchedWords::Unlike& unlike) {
  end([&](RingGroup& group) {
    const std::string other = "rank " + std::to_string(unlike.rank);
    const std::string what = unlike.heard ? "and " + other + " has seen one in another call"
                                          : "got another one on " + other + " than on rank " +
                                                std::to_string(group.rank());
    return "ranks must make the same calls in the same order, " + what +
           "; the group cannot be used any more";
  });
}

void SignalWatch::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

void SignalWatch::describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  call_ = call;
  step_of_rank_ = std::move(step_of_rank);
}

bool SignalWatch::all_read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (given_up_) return true;
  const auto read = look_at({Phase::kUntilRead, 1}), copied = look_at({Phase::kStreamUntilRead, 1});
  const auto has_read = [&](int64_t rank) {
    return read && copied && (*read)[rank] != 0 && (*copied)[rank] != 0;
  };
  if (std::all_of(others_.begin(), others_.end(), has_read)) return true;
  if (!leaving_since_) leaving_since_ = now_();
  return now_() - *leaving_since_ >= patience_;
}

void SignalWatch::watch_anew() {
  since_ = now_();
  report_.restart();
  suspected_ = false;
  silent_since_.reset();
}

void SignalWatch::give_up(Phase phase) {
  std::vector<int64_t> suspects = others_;
  const auto asked = now_();
  if (const auto come = look_at(phase)) {
    silent_since_.reset();
    const auto is_here = [&](int64_t rank) { return (*come)[rank] >= phase.least; };
    suspects.erase(std::remove_if(suspects.begin(), suspects.end(), is_here), suspects.end());
    if (suspects.empty()) return watch_anew();  // a call is over, or its kernel has yet to begin
    // The next look, a while later, must see them too: a call that begins takes its words back.
    if (!std::exchange(suspected_, true)) return;
  } else {
    // Nobody gets to the device any more. That may be for what waits there, and have no end.
    if (!silent_since_) silent_since_ = asked;
    if (now_() - *silent_since_ < soon()) return;
  }
  end([&](RingGroup& group) {
    const int64_t step = step_of_rank_ ? (*step_of_rank_)[suspects.front()] : 1;
    return group.blame(call_, step, suspects, "no signal came through shared memory");
  });
}

void SignalWatch::end(const std::function<std::string(RingGroup&)>& why) {
  if (auto group = group_.lock()) {
    group->fail(why(*group));
    // This may be the last to hold it, and its end comes back here for the lock.
    Watchdog::get().free_later(std::move(group));
  }
  given_up_ = true;
  words_->give_up();
  release();
}

// Nothing where the device does not answer.
std::optional<std::vector<uint32_t>> SignalWatch::look_at(Phase phase) {
  const Phase::Kind kind = phase.kind;
  if (phase.in_host_memory()) return words_->come(kind);
  const auto come = std::make_shared<std::vector<uint32_t>>();
  if (!asking_.run(soon(), [words = words_, kind, come] { *come = words->come(kind); })) return {};
  return std::move(*come);
}

void SignalWatch::release() {
  if (asking_.run(soon(), [words = words_] { words->release(); })) released_ = now_();
}

// How long to wait for the device: this thread has others to look after.
std::chrono::milliseconds SignalWatch::soon() const {
  return std::min(patience_ / 16, std::chrono::milliseconds(1000));
}

}  // namespace ringattn
