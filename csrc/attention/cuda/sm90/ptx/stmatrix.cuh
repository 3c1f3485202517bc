// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ringattn::cuda::sm90 {

/// Stores four 8x8 matrices of 16-bit elements. Lane 8 * i + r gives the address of row r of matrix
/// i (16 bytes, aligned); register i of lane 4 * r + t holds columns 2t and 2t + 1 of its row r.
__device__ __forceinline__ void store_matrices(uint32_t row_address, uint32_t m0, uint32_t m1,
                                               uint32_t m2, uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

/// The same of transposed matrices: row r in shared memory is column r of the lanes' matrix.
__device__ __forceinline__ void store_transposed_matrices(uint32_t row_address, uint32_t m0,
                                                          uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_pair(uint32_t address, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}

}  // namespace ringattn::cuda::sm90
