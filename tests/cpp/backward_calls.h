// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "attention/cuda/block_attention_backward.h"
#include "catch.h"
#include "device.h"
#include "strided_tensor.h"

// Calls of the backward of block attention (params.h) beside plain loops in float64. What may not
// be read is NaN: between the rows of strided tensors, keys that no row sees, rows that see none.

namespace ringattn::testing::backward_calls {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Which rows see each key.
enum class Keys { kAll, kNone, kRandom, kWindow, kDocuments, kDiagonal };
constexpr Keys kTables[] = {Keys::kAll, Keys::kNone, Keys::kRandom, Keys::kWindow,
                            Keys::kDocuments};

struct Case {
  DataType dtype = DataType::kBFloat16;
  Keys keys = Keys::kDiagonal;
  int head_dim = 64;
  int batch = 2, heads = 4, kv_heads = 2;
  int num_queries = 150, num_keys = 203;
  int diagonal = 40, first_query = 0;  // of Keys::kDiagonal
  double scale = 0.125, softcap = 0.0;
  bool empty_rows = false;  // some rows have lse -inf
  bool strided = false;     // rows lie apart
  bool deterministic = false;
  bool rounds_key_gradients = false, leaves_room = false;
  uint32_t seed = 1;

  Tensor queries(DataType type) const {
    return {type, batch, num_queries, heads, head_dim, strided};
  }
  Tensor keys_or_values(DataType type) const {
    return {type, batch, num_keys, kv_heads, head_dim, strided};
  }
  Tensor key_gradients() const {
    return keys_or_values(rounds_key_gradients ? dtype : DataType::kFloat32);
  }

  std::string text() const {
    std::ostringstream text;
    text << "dtype " << static_cast<int>(dtype) << ", keys of kind " << static_cast<int>(keys)
         << ", D " << head_dim << ", B " << batch << ", H " << heads << "/" << kv_heads << ", S_q "
         << num_queries << ", S_k " << num_keys << ", diagonal " << diagonal << " from "
         << first_query << ", scale " << scale << ", softcap " << softcap << ", empty rows "
         << empty_rows << ", strided " << strided << ", deterministic " << deterministic
         << ", leaves room " << leaves_room << ", seed " << seed;
    return text.str();
  }
};

/// [S_k, 2], both columns never decreasing, some entries outside [0, S_q].
inline std::vector<int32_t> table(const Case& c) {
  std::mt19937 random(c.seed);
  const int rows = c.num_queries, keys = c.num_keys;
  std::vector<int32_t> begins(keys), ends(keys), ranges;
  for (auto* bounds : {&begins, &ends}) {
    for (int32_t& bound : *bounds) {
      bound = int32_t(random() % (rows + 40)) - 20 + (bounds == &ends ? rows / 5 : 0);
    }
    std::sort(bounds->begin(), bounds->end());
  }
  const std::vector<int> documents = {0, rows / 7, rows / 7 + 1, rows / 2, rows / 2, rows + 1};
  for (int key = 0; key < keys; ++key) {
    const int row = int(int64_t{key} * rows / keys);  // which the key is beside
    int begin = 0, end = rows;
    if (c.keys == Keys::kNone) begin = end = row;
    if (c.keys == Keys::kRandom) begin = begins[key], end = ends[key];
    if (c.keys == Keys::kWindow) begin = row - 3, end = row + 50;
    if (c.keys == Keys::kDocuments) {
      const auto next = std::upper_bound(documents.begin(), documents.end(), row);
      begin = *(next - 1), end = *next;
      // Keys between two documents that no row sees.
      if (row > rows / 4 && row < rows / 2) begin = end = rows / 2;
    }
    ranges.push_back(begin);
    ranges.push_back(end);
  }
  return ranges;
}

struct Problem {
  Case c;
  std::vector<int32_t> ranges;
  Tensor q, k, v, grad_out, dq, dk, dv;
  std::vector<float> lse, delta;                     // [B, H, S_q]
  std::vector<double> want_dq, want_dk, want_dv;     // as the tensors
  std::vector<double> bound_dq, bound_dk, bound_dv;  // what their errors may be
  std::vector<float> dq_before;

  bool sees(int row, int key) const {
    if (c.keys == Keys::kDiagonal) return row >= c.first_query && key - row <= c.diagonal;
    return row >= ranges[2 * key] && row < ranges[2 * key + 1];
  }

  explicit Problem(const Case& given)
      : c(given),
        ranges(table(c)),
        q(c.queries(c.dtype)),
        k(c.keys_or_values(c.dtype)),
        v(c.keys_or_values(c.dtype)),
        grad_out(c.queries(c.dtype)),
        dq(c.queries(DataType::kFloat32)),
        dk(c.key_gradients()),
        dv(c.key_gradients()),
        lse(size_t(c.batch) * c.heads * c.num_queries, kNaN),
        delta(lse.size(), kNaN) {
    std::mt19937 random(c.seed);
    for (Tensor* x : {&q, &k, &v, &grad_out, &dq}) x->fill_normal(random);
    dq_before = dq.values;
    for (auto& x : delta) x = std::normal_distribution<float>(0.0f, 2.0f)(random);
    solve(random);
    poison();
  }

  size_t row_index(int b, int h, int i) const {
    return (size_t(b) * c.heads + h) * c.num_queries + i;
  }

 private:
  bool is_empty(int row) const { return c.empty_rows && row % 7 == 3; }

  void solve(std::mt19937& random) {
    const int dim = c.head_dim, group = c.heads / c.kv_heads;
    const bool is_float = c.dtype == DataType::kFloat32;
    const double unit = is_float ? 0.0 : c.dtype == DataType::kFloat16 ? 0x1p-11 : 0x1p-8;
    want_dq.assign(dq.values.begin(), dq.values.end());
    want_dk.assign(dk.values.size(), 0.0);
    want_dv.assign(dv.values.size(), 0.0);
    bound_dq.assign(want_dq.size(), 2e-6);
    bound_dk.assign(want_dk.size(), 2e-6);
    bound_dv.assign(want_dv.size(), 2e-6);
    std::vector<double> scores(c.num_keys), slopes(c.num_keys);
    for (int b = 0; b < c.batch; ++b)
      for (int h = 0; h < c.heads; ++h)
        for (int i = 0; i < c.num_queries; ++i) {
          const float *row = q.row(b, i, h), *grad = grad_out.row(b, i, h);
          double others = random() % 3 == 0 ? 0.0 : std::exp(random() % 5 * 0.5);
          double sum = others, widest = 0.0;
          for (int j = 0; j < c.num_keys; ++j) {
            if (!sees(i, j)) continue;
            const float* key = k.row(b, j, h / group);
            double score = 0.0;
            for (int d = 0; d < dim; ++d) score += double(row[d]) * key[d];
            score *= c.scale;
            slopes[j] = 1.0;
            if (c.softcap != 0.0) {
              const double tanh = std::tanh(score / c.softcap);
              score = c.softcap * tanh;
              slopes[j] = 1.0 - tanh * tanh;
            }
            scores[j] = score;
            sum += std::exp(score);
            widest = std::max(widest, std::abs(score));
          }
          const double row_lse = is_empty(i) ? -kInfinity : std::log(sum);
          lse[row_index(b, h, i)] = float(row_lse);
          if (row_lse == -kInfinity) continue;
          const double row_delta = delta[row_index(b, h, i)];
          const double fine = 0x1p-20 * (1.0 + widest);  // of float32 sums and exponents
          for (int j = 0; j < c.num_keys; ++j) {
            if (!sees(i, j)) continue;
            const double p = std::exp(scores[j] - row_lse);
            const float *key = k.row(b, j, h / group), *value = v.row(b, j, h / group);
            double dp = -row_delta, size = std::abs(row_delta);
            for (int d = 0; d < dim; ++d) {
              dp += double(grad[d]) * value[d];
              size += std::abs(double(grad[d]) * value[d]);
            }
            const double ds = p * dp * slopes[j] * c.scale;
            // A softcap that saturates leaves few bits of its slope.
            const double error = unit * std::abs(ds) + fine * p * size *
                                                           (c.softcap != 0.0 ? 4.0 : 1.0) *
                                                           std::abs(c.scale);
            for (int d = 0; d < dim; ++d) {
              const size_t query_at = ((size_t(b) * c.num_queries + i) * c.heads + h) * dim + d;
              const size_t key_at =
                  ((size_t(b) * c.num_keys + j) * c.kv_heads + h / group) * dim + d;
              want_dv[key_at] += p * grad[d];
              bound_dv[key_at] += (unit + fine) * p * std::abs(grad[d]);
              want_dk[key_at] += ds * row[d];
              bound_dk[key_at] += error * std::abs(row[d]);
              want_dq[query_at] += ds * key[d];
              bound_dq[query_at] += error * std::abs(key[d]);
            }
          }
        }
    if (!is_float) return;
    // The rule of float32, whatever the sums.
    const auto tighten = [](const std::vector<double>& want, std::vector<double>& bound) {
      double scale = 1.0;
      for (const double x : want) scale = std::max(scale, std::abs(x));
      for (double& x : bound) x = std::min(x, 1e-5 * scale);
    };
    tighten(want_dq, bound_dq);
    tighten(want_dk, bound_dk);
    tighten(want_dv, bound_dv);
  }

  /// Keys that no row sees become NaN, and so do rows outside all that see keys or with lse -inf.
  void poison() {
    int first = c.num_queries, end = 0;
    for (int j = 0; j < c.num_keys; ++j) {
      bool seen = false;
      for (int i = 0; i < c.num_queries; ++i) {
        if (!sees(i, j)) continue;
        seen = true;
        first = std::min(first, i);
        end = std::max(end, i + 1);
      }
      if (seen) continue;
      for (int b = 0; b < c.batch; ++b)
        for (int h = 0; h < c.kv_heads; ++h) {
          std::fill_n(k.row(b, j, h), c.head_dim, kNaN);
          std::fill_n(v.row(b, j, h), c.head_dim, kNaN);
        }
    }
    for (int b = 0; b < c.batch; ++b)
      for (int h = 0; h < c.heads; ++h)
        for (int i = 0; i < c.num_queries; ++i) {
          const size_t at = row_index(b, h, i);
          const bool outside = i < first || i >= end;
          if (!outside && lse[at] != -kInfinity) continue;
          std::fill_n(q.row(b, i, h), c.head_dim, kNaN);
          std::fill_n(grad_out.row(b, i, h), c.head_dim, kNaN);
          delta[at] = kNaN;
          if (outside) lse[at] = kNaN;
        }
  }
};

/// Runs the backward `calls` times, adding into dq, and reads the gradients.
inline void differentiate(Problem& problem, int calls = 1) {
  const Case& c = problem.c;
  BlockAttentionBackwardParams p;
  p.batch = c.batch;
  p.num_queries = c.num_queries;
  p.num_heads = c.heads;
  p.num_kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.scale = float(c.scale);
  p.dtype = c.dtype;
  p.q = problem.q.copy_to_device();
  p.k = problem.k.copy_to_device();
  p.v = problem.v.copy_to_device();
  p.grad_out = problem.grad_out.copy_to_device();
  problem.dq.values = problem.dq_before;
  p.dq = problem.dq.copy_to_device();
  for (Tensor* x : {&problem.dk, &problem.dv}) {
    std::fill(x->values.begin(), x->values.end(), kNaN);
  }
  p.dk = problem.dk.copy_to_device();
  p.dv = problem.dv.copy_to_device();
  const DeviceArray<float> lse(problem.lse), delta(problem.delta);
  p.lse = lse.data();
  p.delta = delta.data();
  p.lse_head_stride = c.num_queries;
  p.lse_batch_stride = int64_t{c.heads} * c.num_queries;
  p.num_keys = c.num_keys;
  const DeviceArray<int32_t> ranges(problem.ranges);
  if (c.keys == Keys::kDiagonal) {
    p.diagonal = std::clamp(c.diagonal, -c.num_queries, c.num_keys);
    p.first_query = c.first_query;
  } else {
    p.query_ranges = ranges.data();
  }
  p.softcap = float(c.softcap);
  p.deterministic = c.deterministic;
  p.leaves_room = c.leaves_room;
  p.rounds_key_gradients = c.rounds_key_gradients;
  for (int call = 0; call < calls; ++call) {
    const DeviceArray<int32_t> semaphores(std::vector<int32_t>(p.num_semaphores()));
    if (c.deterministic || c.seed % 2 == 0) p.semaphores = semaphores.data();
    REQUIRE(cuda::block_attention_backward(p, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  for (Tensor* x : {&problem.dq, &problem.dk, &problem.dv}) x->copy_from_device();
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// A problem that has been differentiated gives the same bits again, `runs` times.
inline void check_repeats(Problem& problem, int runs) {
  const std::vector<float> dq = problem.dq.values, dk = problem.dk.values, dv = problem.dv.values;
  for (int run = 0; run < runs; ++run) {
    differentiate(problem);
    CHECK(same_bits(problem.dq.values, dq));
    CHECK(same_bits(problem.dk.values, dk));
    CHECK(same_bits(problem.dv.values, dv));
  }
}

/// Fails with the place of the worst element where an error is past its bound.
inline void check_within(const char* what, const std::vector<float>& got,
                         const std::vector<double>& want, const std::vector<double>& bound,
                         int row_elements, int dim) {
  double worst = 0.0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(double(got[i]) - want[i]) / bound[i];
    const double share = std::isfinite(error) ? error : 1e9;
    if (share > worst) worst = share, at = i;
  }
  if (worst <= 1.0) return;
  INFO(what << " worst at row " << at / row_elements << " (of all batches), head "
            << at % row_elements / dim << ", column " << at % dim << ": got " << got[at]
            << ", want " << want[at] << ", " << worst << " of the bound");
  CHECK(worst <= 1.0);
}

inline void check(Problem& problem) {
  const Case& c = problem.c;
  const int query_row = c.heads * c.head_dim, key_row = c.kv_heads * c.head_dim;
  check_within("dq", problem.dq.values, problem.want_dq, problem.bound_dq, query_row, c.head_dim);
  check_within("dk", problem.dk.values, problem.want_dk, problem.bound_dk, key_row, c.head_dim);
  check_within("dv", problem.dv.values, problem.want_dv, problem.bound_dv, key_row, c.head_dim);
}

inline void check(const Case& c) {
  INFO(c.text());
  Problem problem(c);
  differentiate(problem);
  check(problem);
}

}  // namespace ringattn::testing::backward_calls
