// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

// Device arithmetic that every kernel family shares: rounding, the fast exponential and logarithm,
// the weights of a merge.

namespace ringattn::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// Two float32 rounded to the two elements of a register, `first` in the lower half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  uint32_t bits;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  }
  return bits;
}

/// The nearest number of bfloat16.
__device__ __forceinline__ float to_bfloat16(float x) {
  return __bfloat162float(__float2bfloat16(x));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x within an ulp, 1 for 1; an ordinary division is a call, and costs registers around it.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Weights of two states in their merged one, and its lse. Two empty states make an empty one; a
/// NaN stays NaN.
struct MergeWeights {
  float first;
  float second;
  float lse;

  __device__ __forceinline__ MergeWeights(float lse_first, float lse_second) {
    if (lse_first == -INFINITY && lse_second == -INFINITY) {
      first = second = 0.0f;
      lse = -INFINITY;
      return;
    }
    const float max = fmaxf(lse_first, lse_second);
    first = exp2_approx((lse_first - max) * kLog2E);
    second = exp2_approx((lse_second - max) * kLog2E);
    const float total = first + second;
    lse = max + log2_approx(total) * kLn2;
    first *= reciprocal(total);
    second *= reciprocal(total);
  }
};

}  // namespace ringattn::cuda
