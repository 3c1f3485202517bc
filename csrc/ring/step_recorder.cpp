// SPDX-License-Identifier: Apache-2.0
#include "ring/step_recorder.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/process_singleton.h"

namespace ringattn {

EventTimer::EventTimer(c10::Device device) : time_(std::chrono::steady_clock::now()) {
  if (device.is_cpu()) return;
  event_ = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

double EventTimer::until(const EventTimer& later) const {
  if (!event_) return std::chrono::duration<double, std::milli>(later.time_ - time_).count();
  later.event_->synchronize();
  return event_->elapsedTime(*later.event_);
}

Recorder& Recorder::get() { return process_singleton<Recorder>(); }

void Recorder::start(bool by_block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.clear();
  num_calls_ = 0;
  by_block_ = by_block;
  on_ = true;
}

void Recorder::add(std::vector<std::function<StepTiming()>> steps) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::move(steps.begin(), steps.end(), std::back_inserter(pending_));
}

std::vector<StepTiming> Recorder::stop() {
  on_ = false;
  std::vector<std::function<StepTiming()>> pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending.swap(pending_);
  }
  std::vector<StepTiming> steps;
  for (const auto& finish : pending) steps.push_back(finish());
  return steps;
}

CallTimer::CallTimer(c10::Device device)
    : device_(device), on_(Recorder::get().on()), call_(on_ ? Recorder::get().begin_call() : 0) {}

void CallTimer::begin_launch() {
  if (!on_) return;
  launch_.emplace(device_);
  attended_.reset();
}

void CallTimer::begin_attention() {
  if (on_) attention_.emplace(device_);
}

void CallTimer::end_attention() {
  if (on_) attended_.emplace(device_);
}

void CallTimer::end_launch(StepTiming timing, std::function<double()> transfer_ms) {
  if (!on_) return;
  timing.call = call_;
  const EventTimer end(device_);
  const EventTimer attended = attended_.value_or(end);
  steps_.push_back([=, launch = *launch_, attention = *attention_] {
    StepTiming timed = timing;
    timed.wait_ms = (timing.own ? 0.0 : launch.until(attention)) + attended.until(end);
    timed.attention_ms = timing.flops > 0.0 ? attention.until(attended) : 0.0;
    timed.transfer_ms = transfer_ms ? transfer_ms() : 0.0;
    return timed;
  });
}

void CallTimer::finish() {
  if (on_) Recorder::get().add(std::move(steps_));
}

}  // namespace ringattn
