// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/export.h"

// For the study of unequal ranks (ringattn.testing): how much slower this process is to be.

namespace ringattn {

/// Every ring step computes `factor` (>= 1) times as much.
RINGATTN_API void set_slowdown(double factor);
RINGATTN_API double slowdown();

/// Kernels whose thread blocks stay on their multiprocessors use no more of them; none: all.
RINGATTN_API void set_sm_cap(std::optional<int32_t> num_sms);
RINGATTN_API int32_t sm_cap();

}  // namespace ringattn
