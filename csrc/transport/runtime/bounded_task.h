// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <future>

#include "core/export.h"

namespace ringattn {

/// Runs one possibly blocking call on its own thread and waits for it with a timeout. For threads
/// that must not be held up: the driver may keep a thread from a device until what runs there has
/// ended. Used by one thread.
class RINGATTN_API BoundedTask {
 public:
  /// Whether `body` returned within `patience`; throws what it threw. False at once, without a call
  /// of `body`, while an earlier call is under way, or where no thread can be had. What `body`
  /// holds is freed before this returns true.
  bool run(std::chrono::milliseconds patience, std::function<void()> body);

 private:
  std::future<void> done_;
};

}  // namespace ringattn
