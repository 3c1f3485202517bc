// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/environment.h"

namespace ringattn::cuda {

/// Whether the Hopper family is asked for (RINGATTN_KERNEL_FAMILY).
inline bool wants_sm90(bool unless_set) {
  const KernelFamily wanted = environment().kernel_family;
  return wanted == KernelFamily::kBest ? unless_set : wanted == KernelFamily::kSm90;
}

}  // namespace ringattn::cuda
