// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Warp-level matrix instructions of compute capability 8.0. In the fragment layouts below a lane is
// (g, t) = (lane / 4, lane % 4).

namespace ringattn::cuda::sm80 {

constexpr int kWarpSize = 32;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Four 8x8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the addresses of the rows of matrix
/// i (16 bytes each). Lane (g, t) receives bytes 4t .. 4t+3 of row g: two 16-bit elements, or one
/// 32-bit element.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The same, transposed: lane (g, t) receives elements (2t, g) and (2t + 1, g) of each matrix.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// c[16, 8] += a[16, 16] @ b[16, 8] in float32. c: rows g, g, g + 8, g + 8, columns 2t, 2t + 1, 2t,
/// 2t + 1.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// c[16, 8] += a[16, 8] @ b[8, 8] in tf32: only the upper 19 bits of a and b count.
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// x = high + low, where high is x rounded to tf32 and low is exact (and read as tf32: 22 bits in
/// all). Note: not cvt.rna.tf32, which is five instructions where there is none of that name. A NaN
/// may leave high, but not low.
__device__ __forceinline__ void split_tf32(float x, uint32_t& high, uint32_t& low) {
  constexpr uint32_t kHalf = 0x1000, kMask = 0xffffe000;  // of tf32's last place; its bits
  high = (__float_as_uint(x) + kHalf) & kMask;
  low = __float_as_uint(x - __uint_as_float(high));
}

}  // namespace ringattn::cuda::sm80
