// SPDX-License-Identifier: Apache-2.0
#pragma once

// A kernel that is launched to follow another one closely has its thread blocks set up as soon as
// all of that one's have ended or let it begin, before what they wrote has been flushed.
//
// Note: while one of a kernel's blocks waits for other ranks, it does not let the next one begin,
// whose blocks would hold multiprocessors meanwhile that those ranks may need where they share the
// device.

namespace ringattn::cuda {

/// Until the kernel before this one has ended and what it wrote is visible; for others, nothing.
/// Code for devices that cannot follow closely has nothing to wait for.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the kernel behind this one begin, when all thread blocks have called it or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ringattn::cuda
