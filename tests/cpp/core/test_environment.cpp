// SPDX-License-Identifier: Apache-2.0
// What the RINGATTN_* variables say, and what is said of those that mean nothing.
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>

#include "catch.h"
#include "core/environment.h"

using ringattn::Environment;
using ringattn::KernelFamily;
using std::chrono::milliseconds;

namespace {

// The environment with these variables set.
Environment with(const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), /*replace=*/1);
  ringattn::reread_environment();
  const Environment read = ringattn::environment();
  for (const auto& [name, value] : variables) unsetenv(name.c_str());
  ringattn::reread_environment();
  return read;
}

}  // namespace

TEST_CASE("what is unset or empty is the default") {
  for (const Environment& read : {with({}), with({{"RINGATTN_HOST_ID", ""},
                                                  {"RINGATTN_KERNEL_FAMILY", ""},
                                                  {"RINGATTN_KERNEL_WAITS", ""},
                                                  {"RINGATTN_LOG", ""},
                                                  {"RINGATTN_WAIT_REPORT_S", ""}})}) {
    CHECK(read.kernel_family == KernelFamily::kBest);
    CHECK(read.kernels_may_wait);
    CHECK_FALSE(read.logs_info);
    CHECK(read.wait_report == milliseconds(10000));
    CHECK(read.host_id.empty());
    CHECK(read.error.empty());
  }
}

TEST_CASE("a host's own name comes before the one that NCCL has") {
  CHECK(with({{"NCCL_HOSTID", "a"}}).host_id == "a");
  CHECK(with({{"NCCL_HOSTID", "a"}, {"RINGATTN_HOST_ID", "b"}}).host_id == "b");
  CHECK(with({{"NCCL_HOSTID", "a"}, {"RINGATTN_HOST_ID", ""}}).host_id == "a");
}

TEST_CASE("each variable sets its own value") {
  CHECK(with({{"RINGATTN_KERNEL_FAMILY", "sm80"}}).kernel_family == KernelFamily::kSm80);
  CHECK(with({{"RINGATTN_KERNEL_FAMILY", "sm90"}}).kernel_family == KernelFamily::kSm90);
  CHECK_FALSE(with({{"RINGATTN_KERNEL_WAITS", "0"}}).kernels_may_wait);
  CHECK(with({{"RINGATTN_KERNEL_WAITS", "1"}}).kernels_may_wait);
  CHECK(with({{"RINGATTN_LOG", "info"}}).logs_info);
  CHECK_FALSE(with({{"RINGATTN_LOG", "warning"}}).logs_info);
  const Environment read = with({{"RINGATTN_WAIT_REPORT_S", "0.25"}});
  CHECK(read.wait_report == milliseconds(250));
  CHECK(with({{"RINGATTN_WAIT_REPORT_S", "1e-9"}}).wait_report == milliseconds(1));
  CHECK(with({{"RINGATTN_WAIT_REPORT_S", "1e300"}}).wait_report > std::chrono::hours(24 * 365));
  CHECK(read.error.empty());
}

TEST_CASE("a value that means nothing is named, the first of several, and leaves the default") {
  const Environment read = with({{"RINGATTN_LOG", "loud"}, {"RINGATTN_KERNEL_WAITS", "no"}});
  CHECK(read.error == "environment variable RINGATTN_KERNEL_WAITS must be 0 or 1, got no");
  CHECK(read.kernels_may_wait);
  CHECK(with({{"RINGATTN_KERNEL_FAMILY", "sm89"}}).error ==
        "environment variable RINGATTN_KERNEL_FAMILY must be sm80 or sm90, got sm89");
  CHECK(with({{"RINGATTN_LOG", "loud"}}).error ==
        "environment variable RINGATTN_LOG must be info or warning, got loud");
  for (const std::string value : {"soon", "-1", "0", "inf", "5s"}) {
    const Environment waits = with({{"RINGATTN_WAIT_REPORT_S", value}});
    CHECK(waits.error ==
          "environment variable RINGATTN_WAIT_REPORT_S must be a positive number of "
          "seconds, got " +
              value);
    CHECK(waits.wait_report == milliseconds(10000));
  }
}
