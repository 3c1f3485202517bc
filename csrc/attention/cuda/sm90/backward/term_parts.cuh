// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "attention/cuda/numeric.cuh"

// Numbers of query rows as bfloat16 has them: arithmetic, which tests run without a device.

namespace ringattn::cuda::sm90 {

/// x as a sum of three numbers of bfloat16: 24 bits. The third is rounded when it is stored.
struct ThreeParts {
  float first, second, third;

  __device__ __forceinline__ explicit ThreeParts(float x) {
    first = to_bfloat16(x);
    const float rest = x - first;
    second = to_bfloat16(rest);
    third = rest - second;
  }
};

/// Clamped to what has finite parts: 0 * inf is NaN. A NaN stays one.
__device__ __forceinline__ float finite_term(float x) {
  constexpr float kLargest = 3e38f;
  return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

/// What is added to the raw scores of a row, for them to become the exponents of probabilities.
///   lse_to_term  -1 / scale: lse in units of raw scores
///   lse          -inf of a row whose probabilities are 0
__device__ __forceinline__ float score_term(float lse_to_term, float lse) {
  return finite_term(lse == -INFINITY ? copysignf(INFINITY, lse_to_term) : lse_to_term * lse);
}

/// What is added to dp of a row. Note: an infinite delta is NaN, not a large number.
__device__ __forceinline__ float delta_term(float delta) {
  return finite_term(std::fabs(delta) == INFINITY ? NAN : -delta);
}

}  // namespace ringattn::cuda::sm90
