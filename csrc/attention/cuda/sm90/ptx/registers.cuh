// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ringattn::cuda::sm90 {

/// The calling warpgroup gives registers back, down to kCount a thread. Every kernel begins with
/// the same number in all threads; copies need few, accumulators many.
template <int kCount>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// Waits until that many are free, and takes them.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// True in one lane of a converged warp, always the same.
__device__ __forceinline__ bool elect_one_lane() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

}  // namespace ringattn::cuda::sm90
