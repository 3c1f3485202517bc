// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn::cuda::sm90 {

/// The compiler moves no instruction past this one, which does nothing but count for a profiler.
__device__ __forceinline__ void keep_instructions_in_order() { asm volatile("pmevent 1;"); }

}  // namespace ringattn::cuda::sm90
