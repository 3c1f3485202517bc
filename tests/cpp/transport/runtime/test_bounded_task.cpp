// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "catch.h"
#include "transport/runtime/bounded_task.h"

using ringattn::BoundedTask;
using std::chrono::milliseconds;

namespace {

constexpr auto kLong = milliseconds(20000);

}  // namespace

TEST_CASE("a task that ends in time has been run, and has let go of what it held") {
  BoundedTask task;
  const auto held = std::make_shared<int>(0);
  for (int times = 1; times <= 3; ++times) {
    REQUIRE(task.run(kLong, [held] { ++*held; }));
    CHECK(*held == times);
    CHECK(held.use_count() == 1);
  }
}

TEST_CASE("a task under way blocks no caller, and no second one is run beside it") {
  const auto task = std::make_shared<BoundedTask>();
  std::promise<void> go_on;
  const auto may_go_on = go_on.get_future().share();
  CHECK_FALSE(task->run(milliseconds(10), [task, may_go_on] { may_go_on.wait(); }));
  bool second = false;
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(task->run(kLong, [&] { second = true; }));
  CHECK(std::chrono::steady_clock::now() - start < kLong / 2);
  go_on.set_value();
  bool through = false;
  for (int times = 0; !through && times < 5000; ++times) {
    std::this_thread::sleep_for(milliseconds(1));
    through = task->run(kLong, [] {});
  }
  CHECK(through);
  CHECK_FALSE(second);
  CHECK(task.use_count() == 1);  // though it held what it was run by
}

TEST_CASE("what a task throws is thrown to the caller") {
  BoundedTask task;
  const auto throws = [] { throw std::runtime_error("the device is gone"); };
  CHECK_THROWS_AS(task.run(kLong, throws), std::runtime_error);
  CHECK(task.run(kLong, [] {}));
}
