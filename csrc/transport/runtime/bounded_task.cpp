// SPDX-License-Identifier: Apache-2.0
#include "transport/runtime/bounded_task.h"

#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace ringattn {

bool BoundedTask::run(std::chrono::milliseconds patience, std::function<void()> body) {
  using std::chrono::milliseconds;
  if (done_.valid() && done_.wait_for(milliseconds(0)) != std::future_status::ready) return false;
  std::promise<void> done;
  done_ = done.get_future();
  // Note: no packaged_task. Its future would keep the body and what that holds, this object even.
  auto task = [body = std::move(body), done = std::move(done)]() mutable {
    try {
      body();
    } catch (const std::exception&) {
      body = nullptr;
      done.set_exception(std::current_exception());
      return;
    }
    body = nullptr;
    done.set_value();
  };
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error&) {
    done_ = {};
    return false;
  }
  if (done_.wait_for(patience) != std::future_status::ready) return false;
  std::exchange(done_, {}).get();
  return true;
}

}  // namespace ringattn
