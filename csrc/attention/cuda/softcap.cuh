// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfloat>
#include <cmath>

#include "attention/cuda/numeric.cuh"
#include "attention/params.h"

// Softcap, for every kernel family.

namespace ringattn::cuda {

/// tanh(x) within 4 units in the last place, also of a small x. Odd; -1 and 1 for infinities; NaN
/// stays NaN. tanh.approx errs by 2^-11: more than rounding the probabilities to 16 bits does.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  // 1 - 2 / (e^2x + 1) loses the last bits of a small result, and a large softcap multiplies them.
  constexpr float kSmall = 0.7f;
  const float square = x * x;
  float p = -5.138658918e-3f;
  p = fmaf(p, square, 2.009196579e-2f);
  p = fmaf(p, square, -5.355885997e-2f);
  p = fmaf(p, square, 1.332911104e-1f);
  p = fmaf(p, square, -3.333319127e-1f);
  const float small = fmaf(x * square, p, x);
  const float magnitude = fabsf(x);
  const float large =
      fmaf(-2.0f, reciprocal(exp2_approx(magnitude * (2.0f * kLog2E)) + 1.0f), 1.0f);
  return magnitude < kSmall ? small : copysignf(large, x);
}

/// softcap * tanh(scale * s / softcap) in two factors: s becomes tanh(inner * s), and the softmax
/// multiplies that by outer_log2, softcap in powers of two. `scale` is not negative: queries carry
/// the sign.
struct Softcap {
  float inner;
  float outer_log2;

  __device__ __forceinline__ Softcap(float scale, float softcap) {
    const float outer = fminf(fmaxf(softcap, kSmallestSoftcap), kLargestSoftcap);
    inner = fminf(scale * reciprocal(outer), FLT_MAX);
    outer_log2 = outer * kLog2E;
  }

  __device__ __forceinline__ float operator()(float s) const { return tanh_by_exp2(inner * s); }
};

}  // namespace ringattn::cuda
