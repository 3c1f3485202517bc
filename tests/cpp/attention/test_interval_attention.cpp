// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "general_calls.h"

// Tables of keys, diagonals, sinks and softcap in every type. RINGATTN_KERNEL_FAMILY says which
// family computes the 16-bit ones.

namespace {

using namespace ringattn::testing::general_calls;

/// Each row goes to the state, each is final, and some are.
void check_all_places(Case c) {
  for (const bool fold : {false, true}) {
    c.fold = fold;
    for (const auto& [begin, end] :
         {std::pair{int64_t{0}, int64_t{0}}, std::pair{int64_t{0}, c.num_queries},
          std::pair{c.num_queries / 5, c.num_queries * 4 / 5}}) {
      c.final_begin = begin;
      c.final_end = end;
      check(c);
    }
  }
}

}  // namespace

TEST_CASE("rows attend to the keys of their intervals, whatever the mask and the type") {
  if (!can_run()) return;
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const int64_t head_dim : {8, 64, 80, 128, 192, 256}) {
      for (const Rows rows : kKinds) {
        Case c;
        c.rows = rows;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.sinks = rows == Rows::kDiagonal || rows == Rows::kNone;
        c.fold = rows == Rows::kRandom || rows == Rows::kGap;
        c.final_begin = rows == Rows::kWindow ? 50 : 0;
        c.final_end = c.num_queries;
        c.seed = static_cast<uint32_t>(head_dim);
        check(c);
      }
    }
  }
}

TEST_CASE("results go to the state or are final, with sinks, softcap and an earlier state") {
  if (!can_run()) return;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Rows rows : {Rows::kRandom, Rows::kNone, Rows::kGap, Rows::kDiagonal}) {
      for (const bool sinks : {false, true}) {
        for (const double softcap : {0.0, 5.0}) {
          Case c;
          c.rows = rows;
          c.dtype = dtype;
          c.head_dim = 128;
          c.sinks = sinks;
          c.softcap = softcap;
          if (rows == Rows::kDiagonal && !sinks && softcap == 0.0) continue;
          check_all_places(c);
        }
      }
    }
  }
}

TEST_CASE("odd numbers of rows, keys and heads") {
  if (!can_run()) return;
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    uint32_t seed = 100;
    for (const int64_t num_queries : {1, 15, 64, 65, 129}) {
      for (const int64_t num_keys : {0, 1, 31, 64, 97, 1500}) {
        Case c;
        c.dtype = dtype;
        c.num_queries = num_queries;
        c.num_keys = num_keys;
        c.heads = num_keys % 2 == 0 ? 6 : 5;
        c.kv_heads = num_keys % 2 == 0 ? 2 : 5;
        c.sinks = true;
        c.final_end = num_queries;
        c.seed = ++seed;
        c.rows = num_keys == 0 ? Rows::kAll : num_keys == 1500 ? Rows::kGap : Rows::kRandom;
        check(c);
      }
    }
  }
}

TEST_CASE("rows see keys from and up to any place in a tile") {
  if (!can_run()) return;
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    for (int64_t shift = 0; shift < 80; shift += 4) {
      Case c;
      c.rows = Rows::kSliding;
      c.dtype = dtype;
      c.head_dim = 128;
      c.num_queries = c.final_end = 200;
      c.num_keys = 700;
      c.first_key = shift;
      c.length = shift % 3 == 0 ? 300 : 321;
      check(c);
    }
  }
}

TEST_CASE("scores that overflow under a mask's lower end are those of visible keys") {
  if (!can_run()) return;
  for (const int64_t head_dim : {64, 128, 256}) {
    Case c;
    c.rows = Rows::kSliding;
    c.dtype = at::kBFloat16;
    c.head_dim = head_dim;
    c.num_queries = c.final_end = 200;
    c.num_keys = 700;
    // Each row's first keys have nearly all its weight, and keys before these would have more.
    Problem problem(c);
    problem.q.abs_();
    const Tensor key = at::arange(c.num_keys, problem.k.options().dtype(at::kFloat));
    problem.k.narrow(1, 0, c.num_keys).copy_((key * -0.1 + 70).view({1, -1, 1, 1}));
    check(problem);
  }
}

TEST_CASE("many random tables") {
  if (!can_run()) return;
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    Case c;
    c.seed = seed;
    c.dtype = seed % 3 == 0 ? at::kFloat : seed % 3 == 1 ? at::kHalf : at::kBFloat16;
    c.rows = kKinds[2 + random() % 5];
    c.head_dim = 8 + random() % 32 * 8;
    c.num_queries = 1 + random() % 400;
    c.num_keys = 10 + random() % 900;
    c.sinks = random() % 2 == 0;
    c.softcap = random() % 2 == 0 ? 0.0 : 2.0 + random() % 50;
    c.scale = (random() % 4 == 0 ? -1.0 : 1.0) / std::sqrt(double(c.head_dim));
    c.fold = random() % 2 == 0;
    c.final_begin = random() % c.num_queries;
    c.final_end = c.final_begin + random() % (c.num_queries - c.final_begin + 1);
    check(c);
  }
}

TEST_CASE("softcap: small and saturated scores, signs and scales") {
  if (!can_run()) return;
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const double softcap : {1e-3, 1.0, 15.0, 50.0, 1e4, 1e30}) {
      for (const double scale : {0.0, 0.125, -0.125, 2.0}) {
        Case c;
        c.rows = Rows::kWindow;
        c.dtype = dtype;
        c.softcap = softcap;
        c.scale = scale;
        c.num_queries = 70;
        c.final_end = 70;
        check(c);
      }
    }
  }
}

TEST_CASE("softcap saturates for scores that overflow, and keeps a NaN") {
  if (!can_run()) return;
  Case c;
  c.rows = Rows::kAll;
  c.dtype = at::kBFloat16;  // float32 products of such numbers are NaN: of their high and low parts
  c.softcap = 3.0;
  c.num_queries = c.final_end = 5;
  c.num_keys = 40;
  Problem problem(c);
  problem.q.select(1, 1).fill_(1e30);
  problem.k.select(1, 7).fill_(1e30);   // this score is +inf
  problem.k.select(1, 8).fill_(-1e30);  // this one -inf
  problem.q.select(1, 2).select(1, 3).fill_(kNaN);
  const Results results = attend(problem);
  CHECK(results.out.isnan().any(3).sum().item<int64_t>() == kBatch);
  CHECK(results.out.select(1, 2).select(1, 3).isnan().all().item<bool>());
  CHECK(results.lse.isnan().sum().item<int64_t>() == kBatch);
  // Half of the other keys have +-3 for a score, too: of 40 keys at most exp(3), at least exp(-3).
  const Tensor row = results.lse.select(2, 1);
  CHECK(row.le(3.0 + std::log(40.0)).all().item<bool>());
  CHECK(row.ge(3.0).all().item<bool>());
}

TEST_CASE("a NaN reaches the rows that see it, and for values their neighbours at most") {
  if (!can_run()) return;
  const auto head_dim = GENERATE(int64_t{64}, int64_t{128});
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const Rows rows : {Rows::kDocuments, Rows::kGap, Rows::kWindow, Rows::kRandom}) {
      Case c;
      c.rows = rows;
      c.dtype = dtype;
      c.head_dim = head_dim;
      c.num_queries = c.final_end = 150;
      c.num_keys = 4000;
      INFO(c.text());
      for (const int64_t key : {0, 380, 572, 2001, 3700, 3999}) {
        const Tensor sees = Problem(c).visible.select(1, key);
        const auto nan_rows = [](const Tensor& x) { return x.isnan().any(3).any(2).any(0); };

        Problem of_keys(c);
        of_keys.k.select(1, key).select(2, 3).fill_(kNaN);
        INFO("key " << key);
        const Results by_key = attend(of_keys);
        CHECK(nan_rows(by_key.out).equal(sees));
        CHECK(by_key.lse.isnan().any(1).any(0).equal(sees));

        Problem of_values(c);
        of_values.v.select(1, key).select(2, 3).fill_(kNaN);
        const Results by_value = attend(of_values);
        const int64_t from = std::max<int64_t>(key - kNaNReach, 0);
        const int64_t to = std::min(key + kNaNReach + 1, c.num_keys);
        const Tensor may = of_values.visible.narrow(1, from, to - from).any(1);
        const Tensor reached = nan_rows(by_value.out);
        CHECK(sees.logical_and(reached.logical_not()).sum().item<int64_t>() == 0);
        CHECK(reached.logical_and(may.logical_not()).sum().item<int64_t>() == 0);
        CHECK_FALSE(by_value.lse.isnan().any().item<bool>());
      }
      Problem of_query(c);
      of_query.q.select(1, 77).select(2, 3).fill_(kNaN);
      const Tensor sees = of_query.visible.select(0, 77).any();
      const Tensor reached = attend(of_query).out.isnan().any(3).any(2).any(0);
      CHECK(reached.select(0, 77).equal(sees));
      CHECK(reached.sum().item<int64_t>() == sees.item<bool>());
    }
  }
}

TEST_CASE("the same general call gives the same bits, and a table that decreases ends") {
  if (!can_run()) return;
  const auto head_dim = GENERATE(int64_t{64}, int64_t{128});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Case c;
    c.dtype = dtype;
    c.head_dim = head_dim;
    c.final_end = c.num_queries;
    c.sinks = true;
    const Problem problem(c);
    const Results first = attend(problem), second = attend(problem);
    CHECK(first.out.equal(second.out));
    CHECK(first.lse.equal(second.lse));

    Problem wrong(c);
    wrong.ranges.random_(-1000, 1000);
    attend(wrong);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
  }
}
