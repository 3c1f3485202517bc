// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"

// Note: in a namespace of another name, as in test_exchange_partials_emulated.cpp.
#define ringattn ringattn_emulated
#include "attention/cuda/merge_row.cuh"

namespace {

using ringattn::cuda::Floats;
using ringattn::cuda::RunningMerge;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct State {
  float lse, out;
};

// out and lse of all of them, merged in this order; out is that of each column.
State merged(const std::vector<State>& states) {
  RunningMerge<4> merge;
  for (const State& state : states) {
    merge.add(state.lse, Floats<4>{{state.out, state.out, state.out, state.out}});
  }
  float out[4];
  merge.sum.store(out, merge.norm());
  for (const float x : out) CHECK((x == out[0] || (std::isnan(x) && std::isnan(out[0]))));
  return {merge.lse(), out[0]};
}

}  // namespace

TEST_CASE("emulated: a state with lse -inf is neutral whatever its out holds") {
  const State one{0.5f, 3.0f}, other{-1.0f, -2.0f};
  const State expected = merged({one, other});
  for (const float held : {kNaN, INFINITY, -INFINITY, 7.0f}) {
    const State empty{-INFINITY, held};
    for (const auto& states : {std::vector{empty, one, other}, std::vector{one, empty, other},
                               std::vector{one, other, empty, empty}}) {
      const State state = merged(states);
      CHECK(state.out == expected.out);
      CHECK(state.lse == expected.lse);
    }
    const State nothing = merged({empty, empty});
    CHECK(nothing.out == 0.0f);
    CHECK(nothing.lse == -INFINITY);
  }
}

TEST_CASE("emulated: a NaN of a state that is not empty stays") {
  CHECK(std::isnan(merged({{0.5f, kNaN}, {-1.0f, 2.0f}}).out));
  CHECK(std::isnan(merged({{-INFINITY, 0.0f}, {kNaN, 2.0f}}).out));
  CHECK(std::isnan(merged({{kNaN, 2.0f}, {1.0f, 2.0f}}).lse));
}
