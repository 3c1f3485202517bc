// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "catch.h"
#include "transport/runtime/bounded_task.h"

using ringattn::Errand;
using std::chrono::milliseconds;

namespace {

constexpr auto kLong = milliseconds(20000);

}  // namespace

TEST_CASE("an errand that is through in time has been run, and has let go of what it held") {
  Errand errand;
  const auto held = std::make_shared<int>(0);
  for (int times = 1; times <= 3; ++times) {
    REQUIRE(errand.run(kLong, [held] { ++*held; }));
    CHECK(*held == times);
    CHECK(held.use_count() == 1);
  }
}

TEST_CASE("an errand that is under way holds nobody up, and no second one is run beside it") {
  const auto errand = std::make_shared<Errand>();
  std::promise<void> go_on;
  const auto may_go_on = go_on.get_future().share();
  CHECK_FALSE(errand->run(milliseconds(10), [errand, may_go_on] { may_go_on.wait(); }));
  bool second = false;
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(errand->run(kLong, [&] { second = true; }));
  CHECK(std::chrono::steady_clock::now() - start < kLong / 2);
  go_on.set_value();
  bool through = false;
  for (int times = 0; !through && times < 5000; ++times) {
    std::this_thread::sleep_for(milliseconds(1));
    through = errand->run(kLong, [] {});
  }
  CHECK(through);
  CHECK_FALSE(second);
  CHECK(errand.use_count() == 1);  // though it held what it was run by
}

TEST_CASE("what an errand throws is thrown to who sent it") {
  Errand errand;
  const auto throws = [] { throw std::runtime_error("the device is gone"); };
  CHECK_THROWS_AS(errand.run(kLong, throws), std::runtime_error);
  CHECK(errand.run(kLong, [] {}));
}
