// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <future>

#include "core/export.h"

namespace ringattn {

/// One thing at a time that may take for ever, done on a thread of its own. For who must not be
/// held up: the driver may keep a thread from a device until what runs there has ended.
class RINGATTN_API Errand {
 public:
  /// Whether `body` was through within `patience`; throws what it threw. False at once, and `body`
  /// is not run, while an earlier one is under way, or where no thread can be had. What it holds
  /// has been let go of when it is through.
  bool run(std::chrono::milliseconds patience, std::function<void()> body);

 private:
  std::future<void> done_;
};

}  // namespace ringattn
