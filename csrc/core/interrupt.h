// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/export.h"

namespace ringattn {

/// Called by a host thread that waits, many times a second: throws where the user wants the process
/// to stop (Ctrl-C). Does nothing until a check is installed.
RINGATTN_API void check_interrupt();

/// `check` throws what is to leave the wait. The Python package installs one.
RINGATTN_API void set_interrupt_check(void (*check)());

}  // namespace ringattn
