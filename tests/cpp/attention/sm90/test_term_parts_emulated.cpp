// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <random>

#include "attention/cuda/sm90/backward/term_parts.cuh"
#include "catch.h"

// What the Hopper backward adds to scores and to dp by tensor cores: the device code on the host.

namespace {

using ringattn::cuda::kLog2E;
using ringattn::cuda::to_bfloat16;
using ringattn::cuda::sm90::delta_term;
using ringattn::cuda::sm90::finite_term;
using ringattn::cuda::sm90::score_term;
using ringattn::cuda::sm90::ThreeParts;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// What a product of ones with the parts adds.
double sum_of(float x) {
  const ThreeParts parts(x);
  return double{parts.first} + parts.second + to_bfloat16(parts.third);
}

}  // namespace

TEST_CASE("three parts keep 24 bits, and are numbers of bfloat16") {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> mantissa(1.0f, 2.0f);
  for (int exponent = -90; exponent <= 126; ++exponent) {
    for (int i = 0; i < 1000; ++i) {
      const float x = std::ldexp(i % 2 == 0 ? mantissa(random) : -mantissa(random), exponent);
      const ThreeParts parts(x);
      REQUIRE(parts.first == to_bfloat16(parts.first));
      REQUIRE(parts.second == to_bfloat16(parts.second));
      REQUIRE(std::abs(sum_of(x) - x) <= 0x1p-24 * std::abs(double{x}));
    }
  }
  CHECK(sum_of(0.0f) == 0.0);
}

TEST_CASE("terms are finite in bfloat16, but a NaN stays one") {
  for (const float x : {kInfinity, -kInfinity, 3.3e38f, -3.4e38f}) {
    CHECK(std::isfinite(to_bfloat16(finite_term(x))));
    CHECK(std::signbit(finite_term(x)) == std::signbit(x));
    CHECK(std::isfinite(sum_of(finite_term(x))));
  }
  CHECK(std::isnan(finite_term(std::nanf(""))));
  CHECK(finite_term(-1.5f) == -1.5f);
  // Of delta an infinity, too: gradients must not be finite.
  for (const float x : {kInfinity, -kInfinity, std::nanf("")}) CHECK(std::isnan(delta_term(x)));
  CHECK(delta_term(1.5f) == -1.5f);
  CHECK(std::isfinite(delta_term(3.3e38f)));
}

TEST_CASE("a row's term is its lse in units of scores, and hides a dead row, at every scale") {
  for (const float scale : {0x1p-100f, 1e-6f, 0.0884f, -0.0884f, 1.0f, -30.0f, 0x1p100f}) {
    const float score_log2 = scale * kLog2E, lse_to_term = -kLog2E / score_log2;
    for (const float lse : {-80.0f, -0.25f, 0.0f, 3.0f, 700.0f, 65504.0f}) {
      CAPTURE(scale, lse);
      const double exponent = sum_of(score_term(lse_to_term, lse)) * score_log2;
      CHECK(std::abs(exponent + lse * double{kLog2E}) <= 0x1p-22 * std::abs(lse * kLog2E));
    }
    // Of a dead row, whatever its score.
    for (const float s : {0.0f, 1e6f / scale, -1e6f / scale}) {
      const float x = s + static_cast<float>(sum_of(score_term(lse_to_term, -kInfinity)));
      CHECK(std::exp2(x * score_log2) == 0.0f);
    }
  }
}
