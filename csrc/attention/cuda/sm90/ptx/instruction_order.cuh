// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn::cuda::sm90 {

/// ptxas (13.0) moves no arithmetic past this instruction, which does nothing but count for a
/// profiler. Nothing but speed rests on that.
__device__ __forceinline__ void keep_instructions_in_order() { asm volatile("pmevent 1;"); }

}  // namespace ringattn::cuda::sm90
