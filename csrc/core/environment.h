// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include "core/export.h"

namespace ringattn {

enum class KernelFamily { kBest, kSm80, kSm90 };

/// The variables that C++ reads (docs/environment.md), as they were at the first use.
/// One that is empty counts as unset.
struct Environment {
  /// RINGATTN_KERNEL_FAMILY. kSm80: the portable family takes every call. kSm90: a call for the
  /// Hopper family that it does not run is an error. kBest: the best for the device.
  KernelFamily kernel_family = KernelFamily::kBest;
  /// RINGATTN_KERNEL_WAITS. Whether a kernel may fetch blocks by itself, and wait for them on the
  /// device. Otherwise nothing but streams waits: for debuggers, and for processes that take turns
  /// on one device.
  bool kernels_may_wait = true;
  /// RINGATTN_LOG=info.
  bool logs_info = false;
  /// RINGATTN_WAIT_REPORT_S: how long a rank waits before it says so.
  std::chrono::milliseconds wait_report{10000};
  /// RINGATTN_HOST_ID, else NCCL_HOSTID. Ranks whose values differ count as ranks of different
  /// hosts, on one machine too.
  std::string host_id;
  /// What is wrong with the first variable that has no meaning; empty: nothing. Operators refuse
  /// every call with it.
  std::string error;
};

RINGATTN_API const Environment& environment();

/// Reads the variables anew, for tests that change them. No other thread may be in a call.
RINGATTN_API void reread_environment();

}  // namespace ringattn
