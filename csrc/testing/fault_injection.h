// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/export.h"

// Hooks of ringattn.testing.

namespace ringattn {

/// From now on memory for fetched blocks is filled with NaN before each call, and one-sided
/// transfers are delayed by random times drawn from `seed`. Absent: no longer.
RINGATTN_API void inject_transfer_delays(std::optional<uint64_t> seed);
/// The seed; absent where no delays are injected.
RINGATTN_API std::optional<uint64_t> transfer_delay_seed();

}  // namespace ringattn
