// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

// The parts of ringattn._C, in the order in which the module has them: each may name the classes of
// those before it.

namespace ringattn {

/// Segments and schedules of partitions.
void def_partition(pybind11::module_& m);
/// Profiles, plans and predictions.
void def_planner(pybind11::module_& m);
/// Timings, groups, log lines, and what ringattn.testing switches on.
void def_runtime(pybind11::module_& m);

}  // namespace ringattn
