// SPDX-License-Identifier: Apache-2.0
#include "core/environment.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace ringattn {
namespace {

std::string value_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr ? value : "";
}

Environment read() {
  Environment read;
  const auto refuse = [&](const char* variable, const std::string& rule, const std::string& value) {
    if (!read.error.empty()) return;
    read.error =
        std::string("environment variable ") + variable + " must be " + rule + ", got " + value;
  };
  // Whether the variable is `one` or `other`; -1 where it is unset.
  const auto choice = [&](const char* variable, const char* one, const char* other) {
    const std::string value = value_of(variable);
    if (value == one) return 0;
    if (value == other) return 1;
    if (!value.empty()) refuse(variable, std::string(one) + " or " + other, value);
    return -1;
  };
  const int family = choice("RINGATTN_KERNEL_FAMILY", "sm80", "sm90");
  if (family >= 0) read.kernel_family = family == 0 ? KernelFamily::kSm80 : KernelFamily::kSm90;
  read.kernels_may_wait = choice("RINGATTN_KERNEL_WAITS", "0", "1") != 0;
  read.logs_info = choice("RINGATTN_LOG", "info", "warning") == 0;

  read.host_id = value_of("RINGATTN_HOST_ID");
  if (read.host_id.empty()) read.host_id = value_of("NCCL_HOSTID");

  const char* const kWaitReport = "RINGATTN_WAIT_REPORT_S";
  const std::string text = value_of(kWaitReport);
  char* end = nullptr;
  const double seconds = std::strtod(text.c_str(), &end);
  if (*end == 0 && std::isfinite(seconds) && seconds > 0.0) {
    // Clamped: a clock counts no further than to some 1e13 ms, and six times it is added.
    const double ms = std::clamp(1e3 * seconds, 1.0, 1e12);
    read.wait_report = std::chrono::milliseconds(static_cast<int64_t>(ms));
  } else if (!text.empty()) {
    refuse(kWaitReport, "a positive number of seconds", text);
  }
  return read;
}

Environment& current() {
  // Never destroyed: a thread may be in a call while the process ends.
  static Environment& current = *new Environment(read());
  return current;
}

}  // namespace

const Environment& environment() { return current(); }

void reread_environment() { current() = read(); }

}  // namespace ringattn
