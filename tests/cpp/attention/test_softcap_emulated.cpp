// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cuda/softcap.cuh"
#include "catch.h"

// The device code of softcap on the host, where exp2 and the reciprocal are rounded better than on
// a device: by at most two units in the last place.

namespace {

using ringattn::cuda::kLog2E;
using ringattn::cuda::Softcap;
using ringattn::cuda::tanh_by_exp2;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace

TEST_CASE("tanh keeps the last bits of small and large arguments") {
  double worst = 0.0;
  float worst_at = 0.0f;
  for (float x = 1e-20f; x < 20.0f; x *= 1.0001f) {
    const double error = std::abs(tanh_by_exp2(x) / std::tanh(double{x}) - 1.0);
    if (error > worst) worst = error, worst_at = x;
    REQUIRE(tanh_by_exp2(-x) == -tanh_by_exp2(x));
  }
  CAPTURE(worst_at, worst);
  CHECK(worst < 3 * 0x1p-24);
}

TEST_CASE("tanh saturates, and keeps zero and NaN") {
  CHECK(tanh_by_exp2(kInfinity) == 1.0f);
  CHECK(tanh_by_exp2(-kInfinity) == -1.0f);
  CHECK(tanh_by_exp2(1e38f) == 1.0f);
  CHECK(tanh_by_exp2(-1e38f) == -1.0f);
  CHECK(tanh_by_exp2(0.0f) == 0.0f);
  CHECK(std::isnan(tanh_by_exp2(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("capped scores, in powers of two, are c tanh(scale s / c) for any softcap") {
  for (const float cap : {1e-3f, 1.0f, 15.0f, 50.0f, 1e4f, 1e25f}) {
    const Softcap softcap(0.125f, cap);
    double worst = 0.0;
    for (float s = 1e-3f; s < 1e6f; s *= 1.01f) {
      const double want = cap * std::tanh(0.125 * double{s} / cap);
      const double got = double{softcap(s)} * softcap.outer_log2 * kLn2;
      worst = std::max(worst, std::abs(got / want - 1.0));
    }
    CAPTURE(cap, worst);
    CHECK(worst < 8 * 0x1p-24);
  }
}

TEST_CASE("a softcap past what float32 can scale by leaves scores or makes them zero, not NaN") {
  const Softcap none(0.125f, kInfinity);  // a large float64
  CHECK(none(80.0f) * none.outer_log2 == Approx(10.0 * kLog2E));
  for (const float s : {0.0f, 1.0f, -3e38f, kInfinity}) {
    CHECK(std::abs(Softcap(1.0f, 1e-40f)(s)) <= 1.0f);
    CHECK(std::isfinite(Softcap(1.0f, 1e-40f).outer_log2));
    CHECK(std::isfinite(Softcap(1e30f, 1e-40f)(s)));
  }
}
