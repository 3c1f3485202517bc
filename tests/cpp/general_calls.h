// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "attention/cuda/block_attention.h"
#include "attention/tensor_params.h"
#include "catch.h"
#include "skipped_tests.h"

// General calls of block attention (params.h) beside dense attention in float64. What rows do not
// see is NaN as far as that may not matter.

namespace ringattn::testing::general_calls {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kBatch = 2;
constexpr int64_t kNaNReach = 512;  // a NaN among the values may reach rows so near

inline bool can_run() {
  if (at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0) return true;
  skipped_tests.add();
  return false;
}

enum class Rows {
  kAll,
  kNone,
  kRandom,     // random bounds, some of them outside the keys, some of rows that see nothing
  kWindow,     // about 100 keys, and every row later than the one before
  kSliding,    // row i sees keys [first_key + i, first_key + i + length)
  kDocuments,  // jumps of both bounds together
  kGap,        // the first rows see the first keys, the others the last ones
  kPrefix,     // causal, but for the first keys
  kDiagonal,   // no table
};
constexpr Rows kKinds[] = {Rows::kAll,       Rows::kNone, Rows::kRandom, Rows::kWindow,
                           Rows::kDocuments, Rows::kGap,  Rows::kPrefix, Rows::kDiagonal};

struct Case {
  Rows rows = Rows::kRandom;
  at::ScalarType dtype = at::kFloat;
  int64_t head_dim = 64;
  int64_t num_queries = 201;
  int64_t num_keys = 333;
  int64_t heads = 4, kv_heads = 2;
  double scale = 0.11;
  double softcap = 0.0;
  bool sinks = false;
  bool fold = false;
  int64_t final_begin = 0, final_end = 0;
  int64_t diagonal = 40;                // of Rows::kDiagonal
  int64_t first_key = 0, length = 300;  // of Rows::kSliding
  uint32_t seed = 1;

  std::string text() const {
    std::ostringstream text;
    text << "rows of kind " << static_cast<int>(rows) << ", " << dtype << ", D " << head_dim
         << ", S_q " << num_queries << ", S_k " << num_keys << ", H " << heads << "/" << kv_heads
         << ", scale " << scale << ", softcap " << softcap << ", sinks " << sinks << ", fold "
         << fold << ", final [" << final_begin << ", " << final_end << "), seed " << seed;
    return text.str();
  }
};

/// int32 [S_q, 2], both columns never decreasing.
inline Tensor table(const Case& c) {
  std::mt19937 random(c.seed);
  const int64_t rows = c.num_queries, keys = c.num_keys;
  Tensor ranges = at::zeros({rows, 2}, at::kInt);
  auto at_row = ranges.accessor<int32_t, 2>();
  const auto set = [&](int64_t row, int64_t begin, int64_t end) {
    at_row[row][0] = static_cast<int32_t>(begin);
    at_row[row][1] = static_cast<int32_t>(end);
  };
  std::vector<int64_t> begins(rows), ends(rows);
  for (auto* bounds : {&begins, &ends}) {
    for (int64_t& bound : *bounds) {
      bound = static_cast<int64_t>(random() % (keys + 40)) - 20 + (bounds == &ends ? keys / 5 : 0);
    }
    std::sort(bounds->begin(), bounds->end());
  }
  std::vector<int64_t> documents = {0, keys / 7, keys / 7 + 1, keys / 2, keys / 2, keys};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t key = row * keys / rows;  // which the row is beside
    switch (c.rows) {
      case Rows::kAll:
        set(row, 0, keys);
        break;
      case Rows::kNone:
        set(row, key, key);
        break;
      case Rows::kRandom:
        set(row, begins[row], ends[row]);
        break;
      case Rows::kWindow:
        set(row, key - 60, key + 41);
        break;
      case Rows::kSliding:
        set(row, c.first_key + row, c.first_key + row + c.length);
        break;
      case Rows::kDocuments: {
        const auto next = std::upper_bound(documents.begin(), documents.end(), key);
        set(row, *(next - 1), *next);
        break;
      }
      case Rows::kGap:
        set(row, row < rows / 3 ? 0 : keys - keys / 9, row < rows / 3 ? keys / 10 : keys);
        break;
      case Rows::kPrefix:
        set(row, 0, std::max(keys / 3, key + 1));
        break;
      case Rows::kDiagonal:
        set(row, 0, std::clamp<int64_t>(row + 1 + c.diagonal, 0, keys));
        break;
    }
  }
  return ranges;
}

/// bool [S_q, S_k]
inline Tensor visible_pairs(const Tensor& ranges, int64_t num_keys) {
  const Tensor key = at::arange(num_keys, ranges.options());
  return key.ge(ranges.select(1, 0).unsqueeze(1))
      .logical_and(key.lt(ranges.select(1, 1).unsqueeze(1)));
}

struct Problem {
  Case c;
  Tensor q, k, v;     // [B, S, H, D]; k and v with NaN behind the keys of each batch entry
  Tensor ranges;      // int32 [S_q, 2]
  Tensor visible;     // bool [S_q, S_k]
  Tensor sinks;       // float32 [H], undefined without
  Tensor state, lse;  // what is folded

  explicit Problem(const Case& given) : c(given) {
    at::manual_seed(c.seed);
    const auto options = at::TensorOptions(at::kCUDA).dtype(c.dtype);
    const auto wide = options.dtype(at::kFloat);
    q = at::randn({kBatch, c.num_queries, c.heads, c.head_dim}, options);
    const auto behind_keys = [&] {
      const Tensor x = at::full({kBatch, c.num_keys + 100, c.kv_heads, c.head_dim}, kNaN, options);
      const Tensor keys = x.narrow(1, 0, c.num_keys);
      keys.copy_(at::randn(keys.sizes(), options));
      return keys;
    };
    k = behind_keys();
    v = behind_keys();
    ranges = table(c).to(at::kCUDA);
    visible = visible_pairs(ranges, c.num_keys);
    if (c.sinks) {
      sinks = at::randn({c.heads}, wide) * 3;
      sinks[c.heads / 2] = -kInfinity;
    }
    // Some of the rows are empty before.
    state = at::randn(q.sizes(), wide);
    lse = at::randn({kBatch, c.heads, c.num_queries}, wide) + 4;
    lse.slice(2, 0, c.num_queries, 3).fill_(-kInfinity);
    state.slice(1, 0, c.num_queries, 3).fill_(0.0);
  }

  /// Keys that no row sees become NaN, and their values where no seen key is near.
  void poison() {
    const Tensor hidden = visible.any(0).logical_not();
    const Tensor key = at::arange(c.num_keys, hidden.options().dtype(at::kLong));
    const Tensor seen = hidden.logical_not().nonzero().select(1, 0);
    Tensor far = hidden;
    if (seen.numel() > 0) {
      far = (key.unsqueeze(1) - seen.unsqueeze(0)).abs().amin(1).gt(kNaNReach);
    }
    k.masked_fill_(hidden.view({1, -1, 1, 1}), kNaN);
    v.masked_fill_(far.view({1, -1, 1, 1}), kNaN);
  }
};

struct Results {
  Tensor out, state, lse;  // what was not written is NaN, or, folded, as before
};

inline Results attend(const Problem& problem) {
  const Case& c = problem.c;
  Results results = {at::full_like(problem.q, kNaN), at::full_like(problem.state, kNaN),
                     at::full_like(problem.lse, kNaN)};
  if (c.fold) {
    results.state.copy_(problem.state);
    results.lse.copy_(problem.lse);
  }
  KeySegment segment;
  segment.k = ringattn::strided(problem.k);
  segment.v = ringattn::strided(problem.v);
  segment.num_keys = static_cast<int32_t>(c.num_keys);
  if (c.rows == Rows::kDiagonal) {
    segment.diagonal =
        static_cast<int32_t>(std::clamp<int64_t>(c.diagonal, -c.num_queries, c.num_keys));
  } else {
    segment.key_ranges = problem.ranges.data_ptr<int32_t>();
  }
  BlockAttentionParams params;
  static_cast<ringattn::AttentionShape&>(params) =
      ringattn::attention_shape(problem.q, c.kv_heads, c.scale);
  params.q = ringattn::strided(problem.q);
  params.segments = &segment;
  params.num_segments = 1;
  params.out = ringattn::strided(results.out);
  params.state = ringattn::strided(results.state);
  params.lse = results.lse.data_ptr<float>();
  params.lse_batch_stride = results.lse.stride(0);
  params.lse_head_stride = results.lse.stride(1);
  params.final_begin = static_cast<int32_t>(c.final_begin);
  params.final_end = static_cast<int32_t>(c.final_end);
  params.fold = c.fold;
  params.softcap = static_cast<float>(c.softcap);
  if (c.sinks) params.sinks = problem.sinks.data_ptr<float>();
  REQUIRE(ringattn::cuda::block_attention(params, ringattn::current_stream(problem.q)) ==
          cudaSuccess);
  return results;
}

struct Expected {
  Tensor out;    // float64 [B, S_q, H, D]
  Tensor lse;    // float64 [B, H, S_q]
  Tensor bound;  // [B, S_q, H, D]: what the error may be
};

inline Expected expected(const Problem& problem) {
  const Case& c = problem.c;
  const auto heads_first = [&](const Tensor& x) {
    return x.to(at::kDouble).repeat_interleave(c.heads / x.size(2), 2).transpose(1, 2);
  };
  const Tensor q = heads_first(problem.q), k = heads_first(problem.k), v = heads_first(problem.v);
  Tensor scores = at::matmul(q, k.transpose(2, 3)) * c.scale;
  if (c.softcap != 0.0) scores = at::tanh(scores / c.softcap) * c.softcap;
  scores.masked_fill_(problem.visible.logical_not(), -kInfinity);
  Tensor lse = at::logsumexp(scores, {3});
  if (c.fold) lse = at::logaddexp(lse, problem.lse.to(at::kDouble));
  if (c.sinks) {
    const Tensor row = at::arange(c.num_queries, problem.ranges.options());
    const Tensor final_rows = row.ge(c.final_begin).logical_and(row.lt(c.final_end));
    const Tensor sink = problem.sinks.to(at::kDouble).view({1, -1, 1});
    lse = at::where(final_rows, at::logaddexp(lse, sink), lse);
  }
  const Tensor floor = lse.clamp_min(-1e300).unsqueeze(3);
  const Tensor weights = at::exp(scores - floor);
  const Tensor values = v.nan_to_num(0.0);  // those of hidden keys, whose weights are 0
  Tensor out = at::matmul(weights, values);
  Tensor sizes = at::matmul(weights, values.abs());
  if (c.fold) {
    const Tensor weight = at::exp(problem.lse.to(at::kDouble).unsqueeze(3) - floor);
    const Tensor before = problem.state.to(at::kDouble).transpose(1, 2);
    out = out + weight * before;
  }
  // Rounded probabilities, and for 16-bit types a rounded result; float32 sums; scores rounded to
  // float32, by which wide ones err more.
  const double unit = c.dtype == at::kFloat ? 0x1p-22 : c.dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
  const Tensor sizes_of_scores = at::where(scores.isfinite(), scores.abs(), 0);
  const double scores_error =
      scores.numel() == 0 ? 0.0 : 0x1p-22 * sizes_of_scores.max().item<double>();
  const Tensor bound = sizes * (unit + scores_error) + out.abs() * unit + 3e-6;
  return {out.transpose(1, 2), lse, bound.transpose(1, 2)};
}

/// Fails with the coordinate of the worst element where some error is past its bound, or a NaN or
/// an infinity is in the wrong place.
inline void check_within(const char* what, const Tensor& got, const Tensor& want,
                         const Tensor& bound) {
  const Tensor wide = got.to(at::kDouble);
  const Tensor same = wide.eq(want).logical_or(wide.isnan().logical_and(want.isnan()));
  const Tensor share = at::where(same, 0.0, ((wide - want).abs() / bound).nan_to_num(1e9, 1e9));
  if (share.numel() == 0) return;
  const int64_t flat = share.argmax().item<int64_t>();
  const double worst = share.flatten()[flat].item<double>();
  std::ostringstream text;
  text << what << " worst at (";
  int64_t rest = flat, elements = share.numel();
  for (const int64_t size : share.sizes()) {
    elements /= size;
    text << rest / elements << (elements > 1 ? ", " : ")");
    rest %= elements;
  }
  text << " of " << share.sizes() << ": got " << wide.flatten()[flat].item<double>() << ", want "
       << want.expand_as(wide).flatten()[flat].item<double>() << ", " << worst << " of the bound";
  INFO(text.str());
  CHECK(worst <= 1.0);
}

inline void check(Problem problem) {
  const Case& c = problem.c;
  problem.poison();
  const Results results = attend(problem);
  INFO(c.text());
  const Expected exact = expected(problem);
  const auto rows = [](const Tensor& x, int64_t begin, int64_t end) {
    return x.narrow(1, begin, end - begin);
  };
  const int64_t begin = c.final_begin, end = c.final_end, all = c.num_queries;
  check_within("lse", results.lse, exact.lse, exact.lse.nan_to_num(0, 0, 0).abs() * 1e-6 + 1e-5);
  check_within("out", rows(results.out, begin, end), rows(exact.out, begin, end),
               rows(exact.bound, begin, end));
  for (const auto& [from, to] : {std::pair{int64_t{0}, begin}, std::pair{end, all}}) {
    check_within("state", rows(results.state, from, to), rows(exact.out, from, to),
                 rows(exact.bound, from, to));
    CHECK(rows(results.out, from, to).isnan().all().item<bool>());
  }
  const Tensor untouched = rows(results.state, begin, end);
  CHECK((c.fold ? untouched.equal(rows(problem.state, begin, end))
                : untouched.isnan().all().item<bool>()));
}
inline void check(const Case& c) { check(Problem(c)); }

}  // namespace ringattn::testing::general_calls
