// SPDX-License-Identifier: Apache-2.0
#include "core/interrupt.h"

#include <atomic>

namespace ringattn {
namespace {

std::atomic<void (*)()> interrupt_check{nullptr};

}  // namespace

void check_interrupt() {
  if (const auto check = interrupt_check.load()) check();
}

void set_interrupt_check(void (*check)()) { interrupt_check = check; }

}  // namespace ringattn
