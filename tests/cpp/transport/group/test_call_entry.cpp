// SPDX-License-Identifier: Apache-2.0
// A group is in one call at a time.
#include <c10/util/Exception.h>

#include <memory>
#include <string>
#include <thread>

#include "catch.h"
#include "fake_backend.h"
#include "transport/group/group_context.h"

using namespace ringattn;
using ringattn::testing::FakeBackend;
using ringattn::testing::Store;
using std::chrono::milliseconds;

namespace {

struct Group {
  explicit Group(int64_t size)
      : context(std::make_unique<FakeBackend>(store, 0, size, milliseconds(60000))) {}

  // What entering a call in another thread, or in this one, says; empty: nothing.
  std::string enter(bool another_thread) {
    std::string said;
    const auto call = [&] {
      try {
        const CallEntry entry(&context, "gather");
      } catch (const c10::Error& error) {
        said = error.what_without_backtrace();
      }
    };
    if (!another_thread) call();
    if (another_thread) std::thread(call).join();
    return said;
  }

  Store store;
  GroupContext context;
};

}  // namespace

TEST_CASE("a second call of a group is refused while one is under way, without another effect") {
  Group group(2);
  for (const bool another_thread : {true, false}) {
    {
      const CallEntry entry(&group.context, "ring_forward");
      for (int times = 0; times < 2; ++times) {
        CHECK(group.enter(another_thread) ==
              "ringattn: a group must be in one call at a time, got gather while ring_forward is "
              "under way; give each thread a group of its own (torch.distributed.new_group)");
      }
      CHECK(group.store.size() == 0);
      CHECK(group.context.latest_call() == -1);
      CHECK_NOTHROW(group.context.failures().throw_if_failed());
    }
    CHECK(group.enter(another_thread).empty());
  }
}

TEST_CASE("a call that fails is over") {
  Group group(2);
  const auto fails = [&] {
    const CallEntry entry(&group.context, "ring_forward");
    throw std::runtime_error("no memory");
  };
  CHECK_THROWS_AS(fails(), std::runtime_error);
  CHECK(group.enter(/*another_thread=*/true).empty());
}

TEST_CASE("a rank alone, with or without a group, may be in any number of calls") {
  Group group(1);
  const CallEntry entry(&group.context, "ring_forward"), no_group(nullptr, "ring_forward");
  CHECK(group.enter(/*another_thread=*/true).empty());
}
