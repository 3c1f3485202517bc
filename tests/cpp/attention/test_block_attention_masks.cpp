// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "key_tables.h"
#include "reference.h"
#include "remote_segments.h"
#include "segment_lists.h"

// Launches in which each row sees a range of keys, with sinks and softcap, beside float64.

using ringattn::testing::any_table;
using ringattn::testing::attend_list;
using ringattn::testing::can_run;
using ringattn::testing::Dim;
using ringattn::testing::document_table;
using ringattn::testing::Expected;
using ringattn::testing::expected;
using ringattn::testing::fetching_launch;
using ringattn::testing::Heads;
using ringattn::testing::kAll;
using ringattn::testing::kBatch;
using ringattn::testing::kChunk;
using ringattn::testing::kNaN;
using ringattn::testing::Launch;
using ringattn::testing::max_error;
using ringattn::testing::on_device;
using ringattn::testing::Problem;
using ringattn::testing::Remote;
using ringattn::testing::Results;
using ringattn::testing::same_bits;
using ringattn::testing::Segment;
using ringattn::testing::Shape;
using ringattn::testing::stage_again;
using ringattn::testing::window_table;
using ringattn::testing::zero_scratch;

namespace {

const std::vector<int64_t> kHeadDims = {64, 80, 128, 256};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<Shape> shapes_of(const std::vector<int64_t>& num_keys) {
  std::vector<Shape> shapes;
  for (const int64_t keys : num_keys) shapes.push_back({keys, kAll, 0});
  return shapes;
}

/// Keys that no row sees become NaN, and the values of those far away from what rows see.
void poison_unseen(Segment& segment) {
  constexpr int64_t kFar = 512;
  const at::Tensor ranges = segment.ranges.cpu();
  const int64_t num_keys = segment.k.size(1);
  const auto rows = ranges.accessor<int32_t, 2>();
  std::vector<bool> seen(num_keys), near(num_keys);
  for (int64_t row = 0; row < ranges.size(0); ++row) {
    for (int64_t key = std::max(rows[row][0], 0); key < std::min<int64_t>(rows[row][1], num_keys);
         ++key) {
      seen[key] = true;
    }
  }
  for (const int64_t step : {1, -1}) {
    int64_t since = kFar + 1;  // keys since the latest that is seen
    for (int64_t key = step > 0 ? 0 : num_keys - 1; key >= 0 && key < num_keys; key += step) {
      since = seen[key] ? 0 : since + 1;
      if (since <= kFar) near[key] = true;
    }
  }
  at::Tensor unseen = at::zeros({num_keys}, at::kBool), far = unseen.clone();
  for (int64_t key = 0; key < num_keys; ++key) {
    unseen[key] = !seen[key];
    far[key] = !near[key];
  }
  const auto fill = [](const at::Tensor& x, const at::Tensor& rows) {
    x.masked_fill_(rows.to(x.device()).reshape({1, -1, 1, 1}), kNaN);
  };
  fill(segment.k, unseen);
  fill(segment.v, far);
}

/// Every segment gets a table, unless `random` leaves it its diagonal.
void add_tables(Problem& problem, std::mt19937& random, bool all_tables = true) {
  for (Segment& segment : problem.segments) {
    if (!all_tables && random() % 3 == 0) continue;
    segment.ranges = on_device(any_table(random, problem.q.size(1), segment.k.size(1)));
    segment.diagonal = segment.first_query = 0;
    if (segment.k.size(1) > 0) poison_unseen(segment);
  }
}

/// Sinks of all sizes; one head has none.
void add_sinks(Problem& problem) {
  problem.sinks = at::randn({problem.q.size(2)}, problem.wide()) * 3;
  problem.sinks[1] = -kInfinity;
}

/// Where `shares` is largest, or NaN.
std::string worst(const at::Tensor& shares) {
  int64_t at = shares.reshape({-1}).argmax().item<int64_t>();
  std::vector<int64_t> index(shares.dim());
  for (int64_t i = shares.dim() - 1; i >= 0; --i) {
    index[i] = at % shares.size(i);
    at /= shares.size(i);
  }
  std::ostringstream text;
  text << shares.max().item<double>() << " at (";
  for (const int64_t i : index) text << i << ", ";
  text << ")";
  return text.str();
}

/// `result` [B, S_q, H, D] and `lse` [B, H, S_q] are what is expected of rows [begin, end).
void check_rows(const Expected& exact, const at::Tensor& result, const at::Tensor& lse,
                int roundings, int64_t begin, int64_t end) {
  if (begin == end) return;
  const at::Tensor shares = exact.shares_of_bound(result, roundings).narrow(1, begin, end - begin);
  const at::Tensor mine = lse.to(at::kDouble), same = mine.eq(exact.lse);
  // Of large scores, float32 keeps fewer decimals.
  const at::Tensor errors = (at::where(same, at::zeros_like(mine), (mine - exact.lse).abs()) /
                             at::where(same, at::ones_like(mine), 1 + exact.lse.abs() / 4))
                                .narrow(2, begin, end - begin);
  INFO("rows from " << begin << ": share of the bound (b, row, h, d) " << worst(shares)
                    << ", error of lse (b, h, row) " << worst(errors));
  CHECK(shares.max().item<double>() <= 1.0);
  CHECK(errors.max().item<double>() < 3e-5);
}

/// Rows [final_begin, final_end) are final, the others are in the state.
void check(const Problem& problem, const Launch& launch, const Results& results) {
  const int64_t rows = problem.q.size(1), begin = launch.final_begin, end = launch.final_end;
  const Expected exact = expected(problem);
  check_rows(exact, results.state, results.lse, 1, 0, begin);
  check_rows(exact, results.state, results.lse, 1, end, rows);
  check_rows(expected(problem, /*is_final=*/true), results.out, results.lse, 2, begin, end);
  CHECK(results.out.narrow(1, 0, begin).isnan().all().item<bool>());
  CHECK(results.out.narrow(1, end, rows - end).isnan().all().item<bool>());
}

/// Launches `problem` in every mode. However it is launched, it leaves the same bits.
void check_all_modes(const Problem& problem) {
  const int64_t rows = problem.q.size(1);
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {0, rows}, {rows / 3, rows - rows / 5}}) {
    Launch launch;
    launch.final_begin = begin;
    launch.final_end = end;
    launch.with_state = end - begin < rows;
    INFO("final rows from " << begin << " to " << end);
    Results results(problem);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    check(problem, launch, results);
    for (const int32_t max_blocks : {1000, 7, 6, 2, 1}) {
      for (const bool dynamic : {false, true}) {
        if (max_blocks == 1000 && !dynamic) continue;
        launch.max_blocks = max_blocks;
        launch.scratch = dynamic ? zero_scratch() : at::Tensor();
        Results again(problem);
        REQUIRE(attend_list(problem, launch, again) == cudaSuccess);
        INFO("at most " << max_blocks << " thread blocks, dynamic " << dynamic);
        CHECK(same_bits(again.out, results.out));
        CHECK(same_bits(again.lse, results.lse));
        CHECK(same_bits(again.state, results.state));
        if (dynamic) CHECK(launch.scratch.eq(0).all().item<bool>());
      }
    }
  }
}

/// The first `count` segments into a state, then the others folded into it.
void check_fold(const Problem& problem, size_t count, int64_t final_begin, int64_t final_end) {
  Problem first = problem, others = problem;
  first.segments.resize(count);
  others.segments.erase(others.segments.begin(), others.segments.begin() + count);
  Results results(problem);
  REQUIRE(attend_list(first, {}, results) == cudaSuccess);
  Launch launch;
  launch.fold = true;
  launch.final_begin = final_begin;
  launch.final_end = final_end;
  REQUIRE(attend_list(others, launch, results) == cudaSuccess);
  INFO("fold behind " << count << " segments, final rows from " << final_begin << " to "
                      << final_end);
  check(problem, launch, results);
}

}  // namespace

TEST_CASE("rows see the ranges of one table, in every mode") {
  if (!can_run()) return;
  std::mt19937 random(1);
  const std::vector<int64_t> queries = {1, 37, 128, 129, 300, 641}, keys = {1, 63, 200, 517, 2300};
  for (const int64_t head_dim : kHeadDims) {
    for (int trial = 0; trial < 12; ++trial) {
      const int64_t num_queries = queries[random() % queries.size()];
      const int64_t num_keys = keys[random() % keys.size()];
      const Heads heads = std::vector<Heads>{{8, 4}, {3, 3}, {6, 2}}[random() % 3];
      Problem problem(num_queries, shapes_of({num_keys}), Dim(head_dim),
                      trial % 2 ? at::kHalf : at::kBFloat16, heads);
      add_tables(problem, random);
      if (trial % 3 == 1) add_sinks(problem);
      if (trial % 3 == 2) problem.softcap = trial % 2 ? 2.0 : 30.0;
      INFO("D " << head_dim << ", trial " << trial << ", S_q " << num_queries << ", S_k "
                << num_keys << ", " << heads.query << " heads");
      check_all_modes(problem);
    }
  }
}

TEST_CASE("rows see the ranges of several tables and diagonals, folded or not") {
  if (!can_run()) return;
  std::mt19937 random(2);
  for (const int64_t head_dim : kHeadDims) {
    for (int trial = 0; trial < 8; ++trial) {
      const int64_t num_queries = std::vector<int64_t>{200, 300, 641}[random() % 3];
      std::vector<Shape> shapes = shapes_of({300, 0, 517, 1, 130, 1500, 64});
      shapes[0].diagonal = 0;
      shapes[4] = {130, kAll, 141};
      Problem problem(num_queries, shapes, Dim(head_dim), trial % 2 ? at::kHalf : at::kBFloat16,
                      random() % 2 ? Heads{8, 4} : Heads{6, 2});
      add_tables(problem, random, /*all_tables=*/trial % 4 == 0);
      add_sinks(problem);
      if (trial % 2 == 1) problem.softcap = 5.0;
      if (trial == 2) problem.scale = -problem.scale;
      INFO("D " << head_dim << ", trial " << trial << ", S_q " << num_queries);
      check_all_modes(problem);
      check_fold(problem, 3, 0, 0);
      check_fold(problem, 3, 0, num_queries);
      check_fold(problem, 1, num_queries / 3, num_queries - 20);
    }
  }
}

TEST_CASE("sinks and softcap work without a table, where scores are wide too") {
  if (!can_run()) return;
  for (const int64_t head_dim : kHeadDims) {
    for (const double scale : {0.11, -0.4, 1.7, 0.0}) {
      for (const double softcap : {0.0, 1.0, 50.0}) {
        Problem problem(333, {{700, 300, 0}, {129, -100, 200}, {400, kAll, 0}}, Dim(head_dim),
                        at::kBFloat16);
        problem.scale = scale;
        problem.softcap = softcap;
        add_sinks(problem);
        INFO("D " << head_dim << ", scale " << scale << ", softcap " << softcap);
        check_all_modes(problem);
        check_fold(problem, 1, 0, 333);
      }
    }
  }
}

TEST_CASE("an infinite score is at the softcap, and rows that see nothing are their sink") {
  if (!can_run()) return;
  for (const int64_t head_dim : kHeadDims) {
    Problem problem(200, shapes_of({300}), Dim(head_dim), at::kBFloat16, {4, 4});
    problem.softcap = 20.0;
    add_sinks(problem);
    problem.q.select(1, 11).fill_(1.0);
    problem.segments[0].k.select(1, 40).fill_(kInfinity);
    problem.segments[0].k.select(1, 41).fill_(-kInfinity);
    ringattn::testing::KeyTable table = window_table(200, 300, 100, 250, 100);
    for (int row = 0; row < 7; ++row) table[2 * row + 1] = 0;
    problem.segments[0].ranges = on_device(table);
    Launch launch;
    launch.final_end = 200;
    Results results(problem);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    const auto row_of = [](const at::Tensor& x, int row, int dim) { return x.select(dim, row); };
    // Two scores of +-20 and others within a few units: q is 1 in this row.
    const Expected exact = expected(problem, true);
    CHECK(max_error(row_of(results.lse, 11, 2), row_of(exact.lse, 11, 2)) < 3e-5);
    for (int row = 0; row < 7; ++row) {
      CHECK(row_of(results.out, row, 1).eq(0).all().item<bool>());
      CHECK(row_of(results.lse, row, 2).eq(problem.sinks.unsqueeze(0)).all().item<bool>());
    }
  }
}

TEST_CASE("a NaN reaches the rows that see it, and no other") {
  if (!can_run()) return;
  std::mt19937 random(3);
  for (const int64_t head_dim : kHeadDims) {
    for (const double softcap : {0.0, 10.0}) {
      Problem problem(300, shapes_of({900}), Dim(head_dim), at::kBFloat16, {4, 2});
      problem.softcap = softcap;
      problem.segments[0].ranges = on_device(document_table(random, 300, 900, 120, true));
      problem.q[1][77][2].fill_(kNaN);
      for (const int64_t key : {3, 130, 200}) problem.segments[0].k[0][key][1].fill_(kNaN);
      Launch launch;
      launch.final_end = 300;
      Results results(problem);
      REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
      const Expected exact = expected(problem, true);
      INFO("D " << head_dim << ", softcap " << softcap);
      CHECK(exact.lse.isnan().any().item<bool>());
      CHECK(results.lse.isnan().equal(exact.lse.isnan()));
      const at::Tensor rows = exact.lse.isnan().transpose(1, 2).unsqueeze(3);
      CHECK(results.out.isnan().equal(rows.expand_as(results.out)));
      const auto zero = [&](const at::Tensor& x) { return x.masked_fill(rows, 0.0); };
      CHECK(zero(exact.shares_of_bound(results.out, 2)).max().item<double>() <= 1.0);
    }
  }
}

TEST_CASE("a table gives the bits of the diagonal that says the same") {
  if (!can_run()) return;
  for (const int64_t head_dim : kHeadDims) {
    Problem problem(700, {{900, 200, 0}, {2300, -50, 0}}, Dim(head_dim), at::kHalf);
    add_sinks(problem);
    Results by_diagonal(problem), by_table(problem);
    REQUIRE(attend_list(problem, {}, by_diagonal) == cudaSuccess);
    for (Segment& segment : problem.segments) {
      segment.ranges =
          on_device(window_table(700, segment.k.size(1), 0, 1 << 20, segment.diagonal));
      segment.diagonal = 0;
    }
    REQUIRE(attend_list(problem, {}, by_table) == cudaSuccess);
    CHECK(same_bits(by_table.state, by_diagonal.state));
    CHECK(same_bits(by_table.lse, by_diagonal.lse));
  }
}

TEST_CASE("a launch that fetches keys attends the ranges of its tables") {
  if (!can_run()) return;
  std::mt19937 random(4);
  for (const int64_t head_dim : kHeadDims) {
    for (int trial = 0; trial < 8; ++trial) {
      Problem problem(500, shapes_of({500, 420, 500, 100}), Dim(head_dim), at::kBFloat16,
                      trial % 2 ? Heads{8, 4} : Heads{3, 3});
      add_tables(problem, random);
      add_sinks(problem);
      if (trial % 4 >= 2) problem.softcap = 15.0;
      Launch launch;
      launch.final_end = 500;
      Results local(problem);
      REQUIRE(attend_list(problem, launch, local) == cudaSuccess);
      check(problem, launch, local);
      const Remote remote(problem, trial < 4 ? nullptr : &random);
      launch = fetching_launch(problem, 3, 64);
      launch.final_end = 500;
      for (const uint32_t delay_seed : {0, 5, 6}) {
        remote.forget();
        stage_again(problem, launch);
        launch.delay_seed = delay_seed;
        Results fetched(problem);
        REQUIRE(attend_list(problem, launch, fetched) == cudaSuccess);
        INFO("D " << head_dim << ", trial " << trial << ", delays " << delay_seed);
        CHECK(same_bits(fetched.out, local.out));
        CHECK(same_bits(fetched.lse, local.lse));
        CHECK(launch.scratch.eq(0).all().item<bool>());
      }
    }
  }
}

TEST_CASE("of what a launch fetches at once two segments are attended, with sinks and softcap") {
  if (!can_run()) return;
  for (const int64_t head_dim : kHeadDims) {
    Problem problem(300, kChunk, Dim(head_dim), at::kBFloat16);
    add_sinks(problem);
    problem.softcap = 15.0;
    Launch launch;
    launch.final_end = 300;
    Results local(problem);
    REQUIRE(attend_list(problem, launch, local) == cudaSuccess);
    check(problem, launch, local);
    const Remote remote(problem);
    launch = fetching_launch(problem, 3, 64);
    launch.final_end = 300;
    for (const uint32_t delay_seed : {0, 5, 6}) {
      remote.forget();
      stage_again(problem, launch);
      launch.delay_seed = delay_seed;
      Results fetched(problem);
      REQUIRE(attend_list(problem, launch, fetched) == cudaSuccess);
      INFO("D " << head_dim << ", delays " << delay_seed);
      CHECK(same_bits(fetched.out, local.out));
      CHECK(same_bits(fetched.lse, local.lse));
    }
  }
}

TEST_CASE("a table that decreases ends with some result") {
  if (!can_run()) return;
  std::mt19937 random(5);
  for (const int64_t head_dim : kHeadDims) {
    for (int trial = 0; trial < 6; ++trial) {
      Problem problem(641, shapes_of({900, 2300}), Dim(head_dim), at::kBFloat16);
      for (Segment& segment : problem.segments) {
        std::vector<int32_t> table(2 * 641);
        for (int32_t& entry : table) {
          entry = static_cast<int32_t>(random()) % (trial % 2 ? 2000 : INT32_MAX);
        }
        segment.ranges = on_device(table);
        segment.diagonal = 0;
      }
      Results results(problem);
      REQUIRE(attend_list(problem, {}, results) == cudaSuccess);
      CHECK(cudaDeviceSynchronize() == cudaSuccess);
    }
  }
}
