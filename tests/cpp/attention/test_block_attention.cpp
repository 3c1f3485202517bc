// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <limits>
#include <random>

#include "attention/block_attention.h"
#include "catch.h"
#include "reference.h"

using ringattn::AttentionResult;
using ringattn::Band;
using ringattn::KeyBlock;
using ringattn::testing::max_error;
using ringattn::testing::reference_attention;
using ringattn::testing::reference_band_attention;

namespace {

constexpr double kScale = 0.35;

// Every case runs on the CPU in float64 and, where there is one, on a CUDA device in float32.
std::vector<at::TensorOptions> devices() {
  std::vector<at::TensorOptions> devices = {at::TensorOptions(at::kCPU).dtype(at::kDouble)};
#ifdef RINGATTN_WITH_CUDA
  if (at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0) {
    devices.push_back(at::TensorOptions(at::kCUDA).dtype(at::kFloat));
  }
#endif
  return devices;
}

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
            ringattn::block_attention(q, k, v, kScale, diagonal, q.scalar_type());
        const auto [expected, expected_lse] = reference_attention(q, k, v, kScale, diagonal);
        INFO(num_queries << " x " << num_keys << ", diagonal " << diagonal.value_or(-9999));
        CHECK(max_error(out, expected) < tolerance(options));
        CHECK(max_error(lse, expected_lse) < tolerance(options));
      }
    }
  }
}

TEST_CASE("the CPU attends to any bands of any blocks, folded or not, final where it is asked") {
  std::mt19937 random(5);
  const auto limit = [&](int64_t unlimited) {
    return random() % 3 == 0 ? unlimited : static_cast<int64_t>(random() % 320) - 160;
  };
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kDouble);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t num_queries = 1 + random() % 300, num_blocks = 1 + random() % 3;
    const bool fold = trial % 3 == 0;
    const at::Tensor q = at::randn({2, num_queries, 4, 16}, options);
    std::vector<KeyBlock> blocks;
    std::vector<at::Tensor> keys, values;
    std::vector<Band> all;
    int64_t first_key = 0;
    for (int64_t number = 0; number < num_blocks; ++number) {
      const int64_t num_keys = 1 + random() % 300;
      keys.push_back(at::randn({2, num_keys, 2, 16}, options));
      values.push_back(at::randn({2, num_keys, 2, 16}, options));
      // Two bands of a block share no pair: they are one above the other.
      const int64_t middle = random() % (num_queries + 1);
      for (const auto& [begin, end] : {std::pair{int64_t{0}, middle}, {middle, num_queries}}) {
        Band band{begin, end, static_cast<int64_t>(random() % num_keys), num_keys};
        band.upper = limit(Band::kUnlimited);
        band.lower = limit(-Band::kUnlimited);
        if (band.num_pairs() <= 0) continue;
        blocks.push_back({keys.back(), values.back(), band});
        band.key_begin += first_key;
        band.key_end += first_key;
        all.push_back(band);
      }
      first_key += num_keys;
    }
    AttentionResult result;
    result.final_begin = random() % num_queries;
    result.final_end = num_queries;
    result.out = at::full(q.sizes(), std::nan(""), options);
    result.state = at::zeros(q.sizes(), options);
    result.lse = at::full({2, 4, num_queries}, -std::numeric_limits<double>::infinity(), options);
    result.fold = fold;
    ringattn::block_attention(q, blocks, kScale, result);
    const auto [expected, expected_lse] =
        reference_band_attention(q, at::cat(keys, 1), at::cat(values, 1), kScale, all);
    const int64_t num_final = result.final_end - result.final_begin;
    CHECK(max_error(result.lse, expected_lse) < 1e-11);
    CHECK(max_error(result.state.narrow(1, 0, result.final_begin),
                    expected.narrow(1, 0, result.final_begin)) < 1e-11);
    CHECK(max_error(result.out.narrow(1, result.final_begin, num_final),
                    expected.narrow(1, result.final_begin, num_final)) < 1e-11);
  }
}

TEST_CASE("no queries, no keys and no batch are attention too") {
  for (const auto& options : devices()) {
    const auto [q, k, v] = inputs(options, 3, 0);
    const auto [out, lse] = ringattn::block_attention(q, k, v, kScale, {}, q.scalar_type());
    CHECK(out.eq(0).all().item<bool>());
    CHECK(lse.isneginf().all().item<bool>());
    const auto empty = inputs(options, 0, 3);
    CHECK(ringattn::block_attention(empty.q, empty.k, empty.v, kScale, 0, q.scalar_type())
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
    ringattn::block_attention(q, k.narrow(1, 0, 30), v.narrow(1, 0, 30), kScale, {}, result);
    result.fold = true;
    result.out = at::full(q.sizes(), std::nan(""), options);
    result.final_begin = final_begin;
    result.final_end = num_queries;
    ringattn::block_attention(q, k.narrow(1, 30, 20), v.narrow(1, 30, 20), kScale, {}, result);

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
        ringattn::block_attention(q, k, v, kScale, 0, q.scalar_type());
    const auto [out, lse] = ringattn::block_attention(heads_first(q), heads_first(k),
                                                      heads_first(v), kScale, 0, q.scalar_type());
    CHECK(max_error(out, expected) < tolerance(options));
    // Rows that begin anywhere, D that is not dense.
    const at::Tensor wide = at::randn({2, 34, 2, 33}, options);
    const at::Tensor odd = wide.narrow(3, 1, 32).slice(3, 0, 32, 2);
    CHECK(max_error(ringattn::block_attention(q, odd, odd, kScale, {}, q.scalar_type()).first,
                    ringattn::block_attention(q, odd.contiguous(), odd.contiguous(), kScale, {},
                                              q.scalar_type())
                        .first) == 0.0);
  }
}
