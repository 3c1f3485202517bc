// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/export.h"

// Hooks of ringattn.testing: make this process slower, for the study of unequal ranks.

namespace ringattn {

/// Every ring step computes `factor` (>= 1) times as much.
RINGATTN_API void set_slowdown(double factor);
RINGATTN_API double slowdown();

/// Persistent kernels occupy at most `num_sms` multiprocessors; absent: all of them.
RINGATTN_API void set_sm_cap(std::optional<int32_t> num_sms);
RINGATTN_API int32_t sm_cap();

}  // namespace ringattn
