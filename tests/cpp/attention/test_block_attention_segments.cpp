// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <limits>
#include <utility>
#include <vector>

#include "reference.h"
#include "segment_lists.h"

// One launch over a list of key segments, beside one call for each of them, and beside float64.

using ringattn::testing::attend_chain;
using ringattn::testing::attend_list;
using ringattn::testing::can_run;
using ringattn::testing::Dim;
using ringattn::testing::Expected;
using ringattn::testing::expected;
using ringattn::testing::Heads;
using ringattn::testing::kAll;
using ringattn::testing::kChunk;
using ringattn::testing::kDiagonals;
using ringattn::testing::kDims;
using ringattn::testing::kLongZigzag;
using ringattn::testing::kNaN;
using ringattn::testing::kOddZigzag;
using ringattn::testing::kPairedDims;
using ringattn::testing::kScale;
using ringattn::testing::kZigzag;
using ringattn::testing::Launch;
using ringattn::testing::max_error;
using ringattn::testing::pairs_row_tiles;
using ringattn::testing::Problem;
using ringattn::testing::Results;
using ringattn::testing::same_bits;
using ringattn::testing::Shape;
using ringattn::testing::zero_scratch;

TEST_CASE("a list of segments is attention over all of them, as the chain of calls is") {
  if (!can_run()) return;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const Dim& dim : kDims) {
      for (const auto& shapes : {kZigzag, kDiagonals, kChunk}) {
        for (const int64_t num_queries : {300, 201, 512}) {
          const Problem problem(num_queries, shapes, dim, dtype);
          const Expected exact = expected(problem);
          const Results chain = attend_chain(problem);
          Results results(problem);
          REQUIRE(attend_list(problem, {}, results) == cudaSuccess);
          INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows << ", S_q " << num_queries
                    << ", " << shapes.size() << " segments, " << dtype);
          CHECK(results.out.isnan().all().item<bool>());
          CHECK(max_error(results.lse, exact.lse) < 1e-5);
          CHECK(exact.share_of_bound(results.state, 1) <= 1.0);
          CHECK(exact.share_of_bound(chain.state, 1) <= 1.0);
          // Rows that are final leave rounded, and only they.
          Results rounded(problem);
          Launch launch;
          launch.final_begin = 37;
          launch.final_end = 190;
          REQUIRE(attend_list(problem, launch, rounded) == cudaSuccess);
          const auto final_rows = [](const at::Tensor& x) { return x.narrow(1, 37, 190 - 37); };
          CHECK(same_bits(final_rows(rounded.out), final_rows(results.state).to(dtype)));
          CHECK(final_rows(rounded.state).isnan().all().item<bool>());
          CHECK(max_error(rounded.state.narrow(1, 190, 10), results.state.narrow(1, 190, 10)) == 0);
        }
      }
    }
  }
}

TEST_CASE("a list of segments folds into a state, and leaves whole tiles rounded") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    Problem problem(300, kZigzag, dim, at::kBFloat16);
    const Expected exact = expected(problem);
    Results whole(problem);
    Launch all_final;
    all_final.final_end = 300;
    REQUIRE(attend_list(problem, all_final, whole) == cudaSuccess);
    CHECK(whole.state.isnan().all().item<bool>());

    // The first two, then the others into their state.
    Problem first = problem;
    first.segments.resize(2);
    Results results(problem);
    REQUIRE(attend_list(first, {}, results) == cudaSuccess);
    problem.segments.erase(problem.segments.begin(), problem.segments.begin() + 2);
    all_final.fold = true;
    REQUIRE(attend_list(problem, all_final, results) == cudaSuccess);
    INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows);
    CHECK(max_error(results.lse, exact.lse) < 1e-5);
    CHECK(max_error(whole.lse, exact.lse) < 1e-5);
    CHECK(exact.share_of_bound(results.out, 2) <= 1.0);
    CHECK(exact.share_of_bound(whole.out, 2) <= 1.0);
  }
}

TEST_CASE("thread blocks that share keys and values leave the bits of those that do not") {
  if (!can_run()) return;
  const std::vector<Shape> causal = {{2300, 0, 0}}, crooked = {{2100, -290, 0}, {129, -100, 200}};
  for (const Dim& dim : kPairedDims) {
    for (const auto& shapes : {causal, crooked, kLongZigzag}) {
      const Problem problem(700, shapes, dim, at::kBFloat16);
      for (const bool is_final : {false, true}) {
        Launch launch;
        launch.final_end = is_final ? 700 : 0;
        Results pairs(problem), single(problem);
        REQUIRE(attend_list(problem, launch, pairs) == cudaSuccess);
        launch.max_blocks = 7;  // odd: not all of them could be in pairs
        REQUIRE(attend_list(problem, launch, single) == cudaSuccess);
        INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows << ", " << shapes.size()
                  << " segments, final " << is_final);
        CHECK(expected(problem).share_of_bound(is_final ? pairs.out : pairs.state,
                                               is_final ? 2 : 1) <= 1.0);
        CHECK(same_bits(pairs.out, single.out));
        CHECK(same_bits(pairs.state, single.state));
        CHECK(same_bits(pairs.lse, single.lse));
        // Into the state that is there now.
        if (is_final) continue;
        launch.fold = true;
        REQUIRE(attend_list(problem, launch, single) == cudaSuccess);
        launch.max_blocks = 6;
        REQUIRE(attend_list(problem, launch, pairs) == cudaSuccess);
        CHECK(same_bits(pairs.state, single.state));
        CHECK(same_bits(pairs.lse, single.lse));
      }
    }
  }
}

TEST_CASE("neighbouring row tiles that share keys and values leave the bits of tiles alone") {
  if (!can_run()) return;
  struct Case {
    int64_t num_queries;
    std::vector<Shape> shapes;
  };
  const std::vector<Case> cases = {
      {6400, {{2300, -200, 0}}},  // the very first tile sees nothing, its other does
      {7700, {{2300, kAll, 0}, {129, -7500, 0}}},  // 61 or 41 tiles: the last one has no other
      {1338, kOddZigzag},
      {300, kLongZigzag}};
  // Odd numbers of heads for a KV head: one, three.
  const std::vector<std::pair<Heads, at::ScalarType>> kinds = {{{3, 3}, at::kBFloat16},
                                                               {{6, 2}, at::kHalf}};
  for (const auto& [heads, dtype] : kinds) {
    for (const Dim& dim : kPairedDims) {
      for (const auto& [num_queries, shapes] : cases) {
        const Problem problem(num_queries, shapes, dim, dtype, heads);
        INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows << ", " << heads.query
                  << " heads, S_q " << num_queries);
        if (dim.tile_rows == 192 && num_queries == 300) continue;  // of two tiles, alone
        REQUIRE(pairs_row_tiles(problem));
        Results pairs(problem), single(problem);
        const auto check = [&](Launch launch, int32_t most_in_pairs) {
          launch.max_blocks = most_in_pairs;
          REQUIRE(attend_list(problem, launch, pairs) == cudaSuccess);
          launch.max_blocks = 7;  // odd: not all of them could be in pairs
          REQUIRE(attend_list(problem, launch, single) == cudaSuccess);
          INFO("final from " << launch.final_begin << " to " << launch.final_end << ", fold "
                             << launch.fold << ", state " << launch.with_state);
          CHECK(same_bits(pairs.out, single.out));
          CHECK(same_bits(pairs.state, single.state));
          CHECK(same_bits(pairs.lse, single.lse));
        };
        Launch launch;
        check(launch, 1000);
        const Expected exact = expected(problem);
        CHECK(exact.share_of_bound(pairs.state, 1) <= 1.0);
        CHECK(max_error(pairs.lse, exact.lse) < 2e-5);  // of many rows, some of one key
        launch.final_end = num_queries;
        check(launch, 1000);
        CHECK(exact.share_of_bound(pairs.out, 2) <= 1.0);
        launch.with_state = false;
        check(launch, 6);
        // Into the state that is there now; tiles with rows of both kinds too.
        launch.with_state = launch.fold = true;
        check(launch, 6);
        launch.final_begin = 37;
        launch.final_end = num_queries - 90;
        check(launch, 6);
        launch.final_begin = launch.final_end = num_queries;  // none
        check(launch, 1000);
      }
    }
  }
}

TEST_CASE("a list longer than a launch takes is refused, with nothing enqueued") {
  if (!can_run()) return;
  const Problem problem(40, std::vector<Shape>(17, {40, 0, 0}), 64, at::kBFloat16);
  Results results(problem);
  CHECK(attend_list(problem, {}, results) == cudaErrorInvalidValue);
  CHECK(results.lse.isnan().all().item<bool>());
}

TEST_CASE("a list without keys is attention too") {
  if (!can_run()) return;
  const Problem problem(130, {{0, kAll, 0}, {0, 0, 65}}, 64, at::kBFloat16);
  Results results(problem);
  REQUIRE(attend_list(problem, {}, results) == cudaSuccess);
  CHECK(results.state.eq(0).all().item<bool>());
  CHECK(results.lse.isneginf().all().item<bool>());
}

TEST_CASE("kernels that take one segment refuse more, with nothing enqueued") {
  if (!can_run()) return;
  const Problem problem(40, {{40, 0, 0}, {30, kAll, 20}}, 64, at::kFloat);
  Results results(problem);
  CHECK(attend_list(problem, {}, results) == cudaErrorNotSupported);
  CHECK(results.lse.isnan().all().item<bool>());
}
