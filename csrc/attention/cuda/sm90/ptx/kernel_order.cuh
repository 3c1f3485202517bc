// SPDX-License-Identifier: Apache-2.0
#pragma once

// A kernel that is launched to follow another one closely is set up, thread blocks and all, while
// the last of that one's blocks run.

namespace ringattn::cuda::sm90 {

/// Until the kernel before this one has ended and what it wrote is visible; for others, nothing.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace ringattn::cuda::sm90
