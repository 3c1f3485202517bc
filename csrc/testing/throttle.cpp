// SPDX-License-Identifier: Apache-2.0
#include "testing/throttle.h"

#include <atomic>

namespace ringattn {
namespace {

std::atomic<double> factor_in_force{1.0};
std::atomic<int32_t> cap_in_force{INT32_MAX};

}  // namespace

void set_slowdown(double factor) { factor_in_force = factor; }
double slowdown() { return factor_in_force; }

void set_sm_cap(std::optional<int32_t> num_sms) { cap_in_force = num_sms.value_or(INT32_MAX); }
int32_t sm_cap() { return cap_in_force; }

}  // namespace ringattn
