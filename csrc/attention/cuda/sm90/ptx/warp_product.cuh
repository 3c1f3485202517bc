// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// A product of one warp, for what a warpgroup does not do together. A lane is (g, t) = (lane / 4,
// lane % 4).

namespace ringattn::cuda::sm90 {

/// 8x8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the addresses of the rows of matrix i (16
/// bytes, aligned). Lane (g, t) receives columns 2t and 2t + 1 of row g.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[2], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row_address)
               : "memory");
}

/// c[16, 8] += a[16, 16] @ b[8, 16].T in float32. c: row g, columns 2t and 2t + 1, then row g + 8.
/// a: matrices of rows 0-7 and 8-15 of columns 0-7, then of 8-15; b: of columns 0-7, then 8-15.
template <typename Element>
__device__ __forceinline__ void add_warp_product(float (&c)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace ringattn::cuda::sm90
