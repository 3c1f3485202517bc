// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn {

/// Whether a kernel may bring blocks by itself, and wait for them on the device. Off
/// (RINGATTN_KERNEL_WAITS=0), nothing but streams waits: for debuggers, and for processes that take
/// turns on one device.
bool kernels_may_wait();

}  // namespace ringattn
