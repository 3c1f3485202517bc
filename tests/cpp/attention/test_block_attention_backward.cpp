// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "backward_calls.h"

namespace {

using namespace ringattn::testing::backward_calls;
using ringattn::DataType;
using ringattn::testing::kNaN;
using ringattn::testing::Tensor;

constexpr DataType kTypes[] = {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32};

}  // namespace

TEST_CASE("gradients of every type and head dim, under diagonals and tables") {
  if (!has_device()) return;
  uint32_t seed = 0;
  for (const DataType dtype : kTypes) {
    for (const int head_dim : {8, 40, 64, 72, 96, 128, 136, 192, 256}) {
      for (const Keys keys : {Keys::kDiagonal, Keys::kRandom, Keys::kDocuments}) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.keys = keys;
        c.scale = 1.0 / std::sqrt(double(head_dim));
        c.batch = 1 + seed % 2;
        c.strided = seed % 3 == 0;
        c.empty_rows = seed % 4 == 0;
        c.deterministic = seed % 2 == 0;
        c.seed = ++seed;
        check(c);
      }
    }
  }
}

TEST_CASE("gradients under every diagonal, of rows from a first one on") {
  if (!has_device()) return;
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat32}) {
    for (const int diagonal : {-150, -100, -64, -1, 0, 1, 53, 64, 128, 203}) {
      for (const int first_query : {0, 1, 64, 100, 150}) {
        Case c;
        c.dtype = dtype;
        c.batch = 1;
        c.heads = c.kv_heads = 1;
        c.diagonal = diagonal;
        c.first_query = first_query;
        c.deterministic = first_query % 2 == 0;
        check(c);
      }
    }
  }
}

TEST_CASE("gradients with a softcap, of any scale") {
  if (!has_device()) return;
  for (const DataType dtype : kTypes) {
    for (const double softcap : {0.0, 0.5, 15.0, 1e4}) {
      for (const double scale : {0.0, 0.125, -0.125, 0.7}) {
        for (const Keys keys : {Keys::kAll, Keys::kWindow}) {
          Case c;
          c.dtype = dtype;
          c.keys = keys;
          c.batch = 1;
          c.heads = 2;
          c.num_queries = 70;
          c.softcap = softcap;
          c.scale = scale;
          check(c);
        }
      }
    }
  }
}

TEST_CASE("gradients of odd numbers of rows, keys and heads") {
  if (!has_device()) return;
  uint32_t seed = 100;
  for (const DataType dtype : kTypes) {
    for (const int num_queries : {0, 1, 15, 63, 64, 65, 129}) {
      for (const int num_keys : {0, 1, 31, 64, 97}) {
        Case c;
        c.dtype = dtype;
        c.num_queries = num_queries;
        c.num_keys = num_keys;
        c.heads = num_keys % 2 == 0 ? 6 : 5;
        c.kv_heads = num_keys % 2 == 0 ? 2 : 5;
        c.keys = seed % 3 == 0 || num_queries == 0 ? Keys::kDiagonal : Keys::kRandom;
        c.diagonal = 0;
        c.strided = seed % 2 == 0;
        c.deterministic = seed % 2 == 0;
        c.seed = ++seed;
        check(c);
      }
    }
  }
}

TEST_CASE("gradients of many random calls") {
  if (!has_device()) return;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed);
    Case c;
    c.seed = seed;
    c.dtype = kTypes[seed % 3];
    c.keys = seed % 4 == 0 ? Keys::kDiagonal : kTables[random() % 5];
    c.head_dim = 8 + random() % 32 * 8;
    c.scale = (random() % 4 == 0 ? -1.0 : 1.0) / std::sqrt(double(c.head_dim));
    c.softcap = random() % 2 == 0 ? 0.0 : 2.0 + random() % 50;
    c.batch = 1 + random() % 2;
    c.kv_heads = 1 + random() % 2;
    c.heads = c.kv_heads * (1 + random() % 3);
    c.num_queries = 1 + random() % 300;
    c.num_keys = 1 + random() % 300;
    c.diagonal = int(random() % (c.num_queries + c.num_keys)) - c.num_queries;
    c.first_query = random() % 3 == 0 ? random() % c.num_queries : 0;
    c.empty_rows = random() % 2 == 0;
    c.strided = random() % 2 == 0;
    c.deterministic = random() % 2 == 0;
    check(c);
  }
}

TEST_CASE("keys that no row sees have gradient 0, and rows that see none add none") {
  if (!has_device()) return;
  for (const DataType dtype : kTypes) {
    Case c;
    c.dtype = dtype;
    c.keys = Keys::kNone;
    Problem problem(c);
    differentiate(problem);
    CHECK(same_bits(problem.dq.values, problem.dq_before));
    for (const Tensor* x : {&problem.dk, &problem.dv}) {
      CHECK(same_bits(x->values, std::vector<float>(x->values.size(), 0.0f)));
    }
  }
}

TEST_CASE("gradients of queries are added to what is there") {
  if (!has_device()) return;
  for (const bool deterministic : {false, true}) {
    Case c;
    c.deterministic = deterministic;
    Problem problem(c);
    differentiate(problem, /*calls=*/2);
    for (size_t i = 0; i < problem.want_dq.size(); ++i) {
      problem.want_dq[i] += problem.want_dq[i] - problem.dq_before[i];
      problem.bound_dq[i] *= 2.0;
    }
    check(problem);
  }
}

TEST_CASE("deterministic gradients are the same bits each time") {
  if (!has_device()) return;
  for (const DataType dtype : kTypes) {
    for (const int head_dim : {64, 128, 256}) {
      for (const Keys keys : {Keys::kAll, Keys::kDiagonal, Keys::kRandom, Keys::kDocuments}) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.keys = keys;
        c.batch = 1;
        c.heads = 2;
        c.kv_heads = 1;
        c.num_queries = 300;
        c.num_keys = 900;
        c.deterministic = true;
        INFO(c.text());
        Problem problem(c);
        differentiate(problem);
        check_repeats(problem, 3);
      }
    }
  }
}

TEST_CASE("gradients of keys and values in 16 bits are those in float32, rounded once") {
  if (!has_device()) return;
  for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
    for (const int head_dim : {40, 64, 128, 200, 256}) {
      for (const Keys keys : {Keys::kDiagonal, Keys::kDocuments}) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.keys = keys;
        c.strided = head_dim != 128;
        INFO(c.text());
        Problem exact(c);
        differentiate(exact);
        c.rounds_key_gradients = true;
        Problem rounded(c);
        differentiate(rounded);
        const auto check_rounded = [&](const Tensor& got, Tensor& wide) {
          for (float& x : wide.values)
            x = ringattn::testing::from_bits(ringattn::testing::to_bits(x, dtype), dtype);
          CHECK(same_bits(got.values, wide.values));
        };
        check_rounded(rounded.dk, exact.dk);
        check_rounded(rounded.dv, exact.dv);
      }
    }
  }
}

TEST_CASE("a table of rows that decreases ends") {
  if (!has_device()) return;
  for (const DataType dtype : kTypes) {
    Case c;
    c.dtype = dtype;
    c.keys = Keys::kAll;
    Problem problem(c);
    std::mt19937 random(5);
    for (int32_t& bound : problem.ranges) bound = int32_t(random() % 2000) - 1000;
    differentiate(problem);
    problem.c.deterministic = dtype != DataType::kFloat32;
    differentiate(problem);
  }
}

TEST_CASE("delta is the product of a gradient and its result, without the gradient of lse") {
  if (!has_device()) return;
  for (const DataType dtype : kTypes) {
    for (const int head_dim : {8, 72, 256}) {
      for (const bool strided : {false, true}) {
        for (const bool has_grad_out : {false, true}) {
          for (const bool has_grad_lse : {false, true}) {
            Case c;
            c.dtype = dtype;
            c.head_dim = head_dim;
            c.strided = strided;
            c.num_queries = 37;
            Tensor grad_out = c.queries(dtype), out = c.queries(dtype);
            std::mt19937 random(7);
            grad_out.fill_normal(random);
            out.fill_normal(random);
            const size_t rows = size_t(c.batch) * c.heads * c.num_queries;
            const std::vector<float> grad_lse = random_values(rows, 8);  // [S_q, B, H]
            const DeviceArray<float> device_grad_lse(grad_lse);
            const DeviceArray<float> delta(std::vector<float>(rows, kNaN));
            const DeviceArray<float> dq(std::vector<float>(rows * head_dim, kNaN));
            ringattn::AttentionDeltaParams p;
            p.out = out.copy_to_device();
            if (has_grad_out) p.grad_out = grad_out.copy_to_device();
            if (has_grad_lse) {
              p.grad_lse = device_grad_lse.data();
              p.grad_lse_row_stride = c.batch * c.heads;
              p.grad_lse_batch_stride = c.heads;
              p.grad_lse_head_stride = 1;
            }
            p.delta = delta.data();
            p.dq = dq.data();
            p.batch = c.batch;
            p.num_queries = c.num_queries;
            p.num_heads = c.heads;
            p.head_dim = head_dim;
            p.dtype = dtype;
            REQUIRE(ringattn::cuda::attention_delta(p, nullptr) == cudaSuccess);
            const std::vector<float> got = delta.values();
            double worst = 0.0;
            for (int b = 0; b < c.batch; ++b)
              for (int h = 0; h < c.heads; ++h)
                for (int i = 0; i < c.num_queries; ++i) {
                  double want = has_grad_lse ? -grad_lse[(i * c.batch + b) * c.heads + h] : 0.0;
                  for (int d = 0; has_grad_out && d < head_dim; ++d) {
                    want += double(grad_out.at(b, i, h, d)) * out.at(b, i, h, d);
                  }
                  const double error = got[(b * c.heads + h) * c.num_queries + i] - want;
                  worst = std::isfinite(error) ? std::max(worst, std::abs(error)) : 1e9;
                }
            CHECK(worst < 2e-5);
            CHECK(dq.values() == std::vector<float>(rows * head_dim, 0.0f));
          }
        }
      }
    }
  }
}
