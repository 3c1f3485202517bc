// SPDX-License-Identifier: Apache-2.0
#include "testing/fault_injection.h"

#include <mutex>

namespace ringattn {
namespace {

std::mutex mutex;  // guards chosen
std::optional<uint64_t> chosen;

}  // namespace

void set_hostile_transfers(std::optional<uint64_t> seed) {
  const std::lock_guard<std::mutex> lock(mutex);
  chosen = seed;
}

std::optional<uint64_t> hostile_transfers() {
  const std::lock_guard<std::mutex> lock(mutex);
  return chosen;
}

}  // namespace ringattn
