// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <limits>

#include "attention/merge_states.h"
#include "catch.h"
#include "core/lse_merge.h"
#include "reference.h"

using ringattn::merge_weights;
using ringattn::testing::max_error;

namespace {
constexpr double kEmpty = -std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
}  // namespace

TEST_CASE("merging weights add up to one and the sum of exponentials") {
  for (const auto& [a, b] : {std::pair{0.0, 0.0}, {3.0, -2.0}, {-700.0, 900.0}, {5.0, 5.5}}) {
    const auto weights = merge_weights(a, b);
    CHECK(weights.a + weights.b == Approx(1.0));
    CHECK(weights.lse == Approx(std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)))));
  }
}

TEST_CASE("an empty state changes nothing, to the last bit") {
  CHECK(merge_weights(1.25, kEmpty).a == 1.0);
  CHECK(merge_weights(1.25, kEmpty).lse == 1.25);
  CHECK(merge_weights(kEmpty, 1.25).b == 1.0);
  CHECK(merge_weights(kEmpty, 1.25).lse == 1.25);
  CHECK(merge_weights(kEmpty, kEmpty).lse == kEmpty);
}

TEST_CASE("a NaN on either side stays") {
  CHECK(std::isnan(merge_weights(kNaN, 1.0).lse));
  CHECK(std::isnan(merge_weights(1.0, kNaN).lse));
  CHECK(std::isnan(merge_weights(kEmpty, kNaN).lse));
}

TEST_CASE("merging the halves of the keys gives attention over all of them, in any strides") {
  const auto options = at::TensorOptions(at::kDouble);
  const at::Tensor q = at::randn({2, 9, 4, 8}, options), k = at::randn({2, 12, 2, 8}, options),
                   v = at::randn({2, 12, 2, 8}, options);
  const auto [all_out, all_lse] = ringattn::testing::reference_attention(q, k, v, 0.3, {});
  auto [out, lse] =
      ringattn::testing::reference_attention(q, k.narrow(1, 0, 5), v.narrow(1, 0, 5), 0.3, {});
  const auto [other_out, other_lse] =
      ringattn::testing::reference_attention(q, k.narrow(1, 5, 7), v.narrow(1, 5, 7), 0.3, {});
  const at::Tensor strided = out.transpose(1, 2).contiguous().transpose(1, 2);
  ringattn::merge_states_(strided, lse, other_out, other_lse);
  CHECK(max_error(strided, all_out) < 1e-12);
  CHECK(max_error(lse, all_lse) < 1e-12);
}

TEST_CASE("an empty state does not spread the NaN of its rows") {
  const at::Tensor out = at::full({1, 1, 1, 8}, kNaN, at::kFloat),
                   lse = at::full({1, 1, 1}, kEmpty, at::kFloat);
  const at::Tensor other = at::ones({1, 1, 1, 8}), other_lse = at::zeros({1, 1, 1});
  ringattn::merge_states_(out, lse, other, other_lse);
  CHECK(out.eq(1).all().item<bool>());
}

TEST_CASE("two empty states give 0, whatever they hold") {
  const at::Tensor out = at::full({1, 1, 1, 8}, kNaN, at::kFloat),
                   lse = at::full({1, 1, 1}, kEmpty, at::kFloat);
  ringattn::merge_states_(out, lse, out.clone(), lse.clone());
  CHECK(out.eq(0).all().item<bool>());
  CHECK(lse.eq(kEmpty).all().item<bool>());
}
