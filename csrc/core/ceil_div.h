// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ringattn {

/// a / b, rounded up; a not negative.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ringattn
