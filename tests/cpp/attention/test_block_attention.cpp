// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <limits>
#include <random>

#include "attention/block_attention.h"
#include "catch.h"
#include "operator_devices.h"
#include "reference.h"

using ringattn::AttentionResult;
using ringattn::KeyBlock;
using ringattn::Scoring;
using ringattn::testing::key_block;
using ringattn::testing::max_error;
using ringattn::testing::reference_attention;
using ringattn::testing::reference_masked_attention;

namespace {

constexpr double kScale = 0.35;

double tolerance(const at::TensorOptions& options) {
  return options.dtype() == at::kDouble ? 1e-11 : 4e-6;
}

struct Inputs {
  at::Tensor q, k, v;
};

Inputs inputs(const at::TensorOptions& options, int64_t num_queries, int64_t num_keys,
              int64_t dim = 16) {
  return {at::randn({2, num_queries, 4, dim}, options), at::randn({2, num_keys, 2, dim}, options),
          at::randn({2, num_keys, 2, dim}, options)};
}

}  // namespace

TEST_CASE("block attention equals three loops, for any diagonal and any lengths") {
  for (const auto& options : devices()) {
    for (const auto& [num_queries, num_keys] :
         {std::pair{1, 1}, {7, 7}, {5, 40}, {70, 33}, {129, 65}}) {
      for (const std::optional<int64_t> diagonal :
           std::vector<std::optional<int64_t>>{{}, 0, 1, 20, -1, -6, -num_queries, 1000}) {
        const auto [q, k, v] = inputs(options, num_queries, num_keys);
        const auto [out, lse] =
            ringattn::block_attention(q, key_block(k, v, diagonal), kScale, q.scalar_type());
        const auto [expected, expected_lse] = reference_attention(q, k, v, kScale, diagonal);
        INFO(num_queries << " x " << num_keys << ", diagonal " << diagonal.value_or(-9999));
        CHECK(max_error(out, expected) < tolerance(options));
        CHECK(max_error(lse, expected_lse) < tolerance(options));
      }
    }
  }
}

TEST_CASE("the CPU attends to any intervals of any blocks, folded or not, with sinks and softcap") {
  std::mt19937 random(5);
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kDouble);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t num_queries = 1 + random() % 300, num_blocks = 1 + random() % 3;
    const at::Tensor q = at::randn({2, num_queries, 4, 16}, options);
    Scoring scoring(kScale);
    if (trial % 2 == 0) scoring.softcap = 1.5;
    std::vector<KeyBlock> blocks;
    std::vector<at::Tensor> keys, values;
    std::vector<std::vector<std::pair<int64_t, int64_t>>> seen(num_queries);  // of all keys
    int64_t first_key = 0;
    for (int64_t number = 0; number < num_blocks; ++number) {
      const int64_t num_keys = 1 + random() % 300;
      keys.push_back(at::randn({2, num_keys, 2, 16}, options));
      values.push_back(at::randn({2, num_keys, 2, 16}, options));
      // Bounds that never decrease, past both ends of the keys, sometimes empty.
      std::vector<int> bounds[2];
      for (auto& column : bounds) {
        for (int64_t row = 0; row < num_queries; ++row) {
          column.push_back(static_cast<int>(random() % (num_keys + 40)) - 20);
        }
        std::sort(column.begin(), column.end());
      }
      const at::Tensor table = at::empty({num_queries, 2}, at::kInt);
      for (int64_t row = 0; row < num_queries; ++row) {
        for (int column = 0; column < 2; ++column) table[row][column] = bounds[column][row];
        const int64_t begin = std::max(bounds[0][row], 0);
        const int64_t end = std::min<int64_t>(bounds[1][row], num_keys);
        if (begin < end) seen[row].emplace_back(first_key + begin, first_key + end);
      }
      blocks.push_back({keys.back(), values.back()});
      blocks.back().key_ranges = table;
      first_key += num_keys;
    }
    AttentionResult result;
    result.final_begin = random() % num_queries;
    result.final_end = num_queries;
    result.out = at::full(q.sizes(), std::nan(""), options);
    result.state = at::zeros(q.sizes(), options);
    result.lse = at::full({2, 4, num_queries}, -std::numeric_limits<double>::infinity(), options);
    result.fold = trial % 3 == 0;
    const auto expect = [&] {
      return reference_masked_attention(
          q, at::cat(keys, 1), at::cat(values, 1), scoring, [&](int64_t i, int64_t j) {
            return std::any_of(seen[i].begin(), seen[i].end(),
                               [&](const auto& x) { return x.first <= j && j < x.second; });
          });
    };
    const auto [state, state_lse] = expect();
    if (trial % 5 < 2) scoring.sinks = at::randn({4}, options);
    const auto [expected, expected_lse] = expect();
    ringattn::block_attention(q, blocks, scoring, result);
    const int64_t num_final = result.final_end - result.final_begin;
    const auto check = [&](const at::Tensor& got, const at::Tensor& want, int64_t dim,
                           int64_t begin, int64_t count) {
      CHECK(max_error(got.narrow(dim, begin, count), want.narrow(dim, begin, count)) < 1e-11);
    };
    // Sinks join final rows alone.
    check(result.lse, state_lse, 2, 0, result.final_begin);
    check(result.state, state, 1, 0, result.final_begin);
    check(result.lse, expected_lse, 2, result.final_begin, num_final);
    check(result.out, expected, 1, result.final_begin, num_final);
  }
}

TEST_CASE("no queries, no keys and no batch are attention too") {
  for (const auto& options : devices()) {
    const auto [q, k, v] = inputs(options, 3, 0);
    const auto [out, lse] = ringattn::block_attention(q, key_block(k, v), kScale, q.scalar_type());
    CHECK(out.eq(0).all().item<bool>());
    CHECK(lse.isneginf().all().item<bool>());
    const auto empty = inputs(options, 0, 3);
    CHECK(
        ringattn::block_attention(empty.q, key_block(empty.k, empty.v, 0), kScale, q.scalar_type())
            .first.numel() == 0);
  }
}

TEST_CASE("folding two blocks equals attention over both, rows leave where they are final") {
  for (const auto& options : devices()) {
    const int64_t num_queries = 40, final_begin = 13;
    const auto [q, k, v] = inputs(options, num_queries, 50);
    const auto [expected, expected_lse] = reference_attention(q, k, v, kScale, {});
    const auto wide = options.dtype(ringattn::state_dtype(q.scalar_type()));

    AttentionResult result;
    result.state = at::full(q.sizes(), std::nan(""), wide);
    result.lse = at::full({2, 4, num_queries}, std::nan(""), wide);
    ringattn::block_attention(q, {{k.narrow(1, 0, 30), v.narrow(1, 0, 30)}}, kScale, result);
    result.fold = true;
    result.out = at::full(q.sizes(), std::nan(""), options);
    result.final_begin = final_begin;
    result.final_end = num_queries;
    ringattn::block_attention(q, {{k.narrow(1, 30, 20), v.narrow(1, 30, 20)}}, kScale, result);

    const int64_t num_final = num_queries - final_begin;
    CHECK(max_error(result.out.narrow(1, final_begin, num_final),
                    expected.narrow(1, final_begin, num_final)) < tolerance(options));
    CHECK(result.out.narrow(1, 0, final_begin).isnan().all().item<bool>());
    CHECK(max_error(result.state.narrow(1, 0, final_begin), expected.narrow(1, 0, final_begin)) <
          tolerance(options));
    CHECK(max_error(result.lse, expected_lse) < tolerance(options));
  }
}

TEST_CASE("memory of another layout gives the same") {
  for (const auto& options : devices()) {
    const auto [q, k, v] = inputs(options, 21, 34);
    const auto heads_first = [](const at::Tensor& x) {
      return x.transpose(1, 2).contiguous().transpose(1, 2);
    };
    const auto [expected, expected_lse] =
        ringattn::block_attention(q, key_block(k, v, 0), kScale, q.scalar_type());
    const auto [out, lse] = ringattn::block_attention(
        heads_first(q), key_block(heads_first(k), heads_first(v), 0), kScale, q.scalar_type());
    CHECK(max_error(out, expected) < tolerance(options));
    // Rows that begin anywhere, D that is not dense.
    const at::Tensor wide = at::randn({2, 34, 2, 33}, options);
    const at::Tensor odd = wide.narrow(3, 1, 32).slice(3, 0, 32, 2);
    const at::Tensor even = odd.contiguous();
    CHECK(max_error(
              ringattn::block_attention(q, key_block(odd, odd), kScale, q.scalar_type()).first,
              ringattn::block_attention(q, key_block(even, even), kScale, q.scalar_type()).first) ==
          0.0);
  }
}
