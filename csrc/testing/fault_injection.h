// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/export.h"

namespace ringattn {

/// For tests: from now on memory for visiting blocks is filled with NaN before each call, and
/// one-sided copies are late by random amounts, drawn from `seed`. Absent: as usual.
RINGATTN_API void set_hostile_transfers(std::optional<uint64_t> seed);
RINGATTN_API std::optional<uint64_t> hostile_transfers();

}  // namespace ringattn
