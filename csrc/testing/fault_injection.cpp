// SPDX-License-Identifier: Apache-2.0
#include "testing/fault_injection.h"

#include <mutex>

namespace ringattn {
namespace {

std::mutex mutex;  // guards seed_in_force
std::optional<uint64_t> seed_in_force;

}  // namespace

void inject_transfer_delays(std::optional<uint64_t> seed) {
  const std::lock_guard<std::mutex> lock(mutex);
  seed_in_force = seed;
}

std::optional<uint64_t> transfer_delay_seed() {
  const std::lock_guard<std::mutex> lock(mutex);
  return seed_in_force;
}

}  // namespace ringattn
