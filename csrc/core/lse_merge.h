// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include "core/shape.h"

// The algebra of partial attention. A state is (out, lse); two states over disjoint keys merge into
//
//   lse = log(exp(lse_a) + exp(lse_b))
//   out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)
//
// which is associative, commutative and has (0, -inf) as its neutral element.

namespace ringattn {

template <typename Real>
struct MergeWeights {
  Real a;    // exp(lse_a - lse)
  Real b;    // exp(lse_b - lse)
  Real lse;  // of both
};

/// Weights that merge two states of one row.
template <typename Real>
inline MergeWeights<Real> merge_weights(Real lse_a, Real lse_b) {
  constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  // Note: an empty side must not be computed with. exp(-inf - -inf) is NaN, and the other side
  // would lose a last bit in log(exp(0) + 0).
  if (lse_b == kEmpty) return {Real(1), Real(0), lse_a};
  if (lse_a == kEmpty) return {Real(0), Real(1), lse_b};
  // The larger one is subtracted, so neither exponential overflows; a NaN on either side stays.
  const Real largest = lse_a > lse_b ? lse_a : lse_b;
  const Real exp_a = std::exp(lse_a - largest);
  const Real exp_b = std::exp(lse_b - largest);
  const Real sum = exp_a + exp_b;
  return {exp_a / sum, exp_b / sum, largest + std::log(sum)};
}

}  // namespace ringattn
