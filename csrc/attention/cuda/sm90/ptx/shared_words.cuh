// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// 16 bytes of shared memory, aligned.

namespace ringattn::cuda::sm90 {

__device__ __forceinline__ void store_words(uint32_t to, int4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

__device__ __forceinline__ int4 load_words(uint32_t from) {
  int4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

}  // namespace ringattn::cuda::sm90
