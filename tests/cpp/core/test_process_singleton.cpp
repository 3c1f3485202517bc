// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <mutex>

#include "catch.h"
#include "core/process_singleton.h"

using ringattn::process_singleton;

namespace {

struct Counted {
  std::mutex mutex;
  int count = 0;
};

}  // namespace

TEST_CASE("a forked process begins anew, whoever had the lock") {
  auto& counted = process_singleton<Counted>();
  const std::lock_guard<std::mutex> lock(counted.mutex);
  counted.count = 3;
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    auto& anew = process_singleton<Counted>();
    _exit(anew.mutex.try_lock() && anew.count == 0 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(&process_singleton<Counted>() == &counted);
  CHECK(counted.count == 3);
}
