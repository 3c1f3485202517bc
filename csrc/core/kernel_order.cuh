// SPDX-License-Identifier: Apache-2.0
#pragma once

// A kernel that is launched to follow another one closely has its thread blocks set up as soon as
// all of that one's have ended, before what they wrote has been flushed.
//
// Note: no kernel says earlier that the next one may come (griddepcontrol.launch_dependents). Where
// its last block waits for other ranks, thread blocks of the next one would hold multiprocessors
// meanwhile, which those ranks may need where they share the device.

namespace ringattn::cuda {

/// Until the kernel before this one has ended and what it wrote is visible; for others, nothing.
/// Code for devices that cannot follow closely has nothing to wait for.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ringattn::cuda
