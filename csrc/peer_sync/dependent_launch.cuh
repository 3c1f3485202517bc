// SPDX-License-Identifier: Apache-2.0
#pragma once

// Programmatic dependent launch: the thread blocks of a kernel start once all of the previous
// kernel's have ended or triggered it, before that kernel's writes have been flushed.
//
// Note: a thread block that waits for other ranks triggers the next kernel only after its wait. The
// next kernel's thread blocks would occupy multiprocessors that those ranks may need where they
// share the device.

namespace ringattn::cuda {

/// Waits until the previous kernel has ended and its writes are visible. Without effect in a launch
/// that is not dependent, and on devices before compute capability 9.0.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start once all thread blocks have called it or ended.
__device__ __forceinline__ void trigger_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ringattn::cuda
