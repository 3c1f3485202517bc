// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/products.cuh"
#include "attention/cuda/sm80/softmax.cuh"
#include "catch.h"
#include "device.h"

// The building blocks of the portable kernels, one warp each, against plain loops.

namespace {

using namespace ringattn::cuda;
using namespace ringattn::cuda::sm80;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kRows = 16, kKeys = 32;

/// s = q @ k.T and o = s @ v, computed as attention does: tiles copied into shared memory, scores
/// in registers. q [kRows, head_dim], k and v [kKeys, head_dim], s [kRows, kKeys].
template <typename Element, int kHeadDim>
__global__ void products(const Element* q, const Element* k, const Element* v, int head_dim,
                         float* s, float* o) {
  using Gemm = Products<Element, 1, kKeys, kHeadDim>;
  using CopyQ = TileCopy<Element, kRows, kHeadDim, kWarpSize>;
  using CopyK = TileCopy<Element, kKeys, kHeadDim, kWarpSize>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_q = shared_address(shared);
  const uint32_t shared_k = shared_q + CopyQ::kBytes, shared_v = shared_k + CopyK::kBytes;
  CopyQ(q, head_dim, head_dim).load(shared_q, 0, kRows);
  CopyK(k, head_dim, head_dim).load(shared_k, 0, kKeys);
  CopyK(v, head_dim, head_dim).load(shared_v, 0, kKeys);
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();

  typename Gemm::Scores scores;
  Gemm::scores(scores, shared_q, shared_k, head_dim);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int n = 0; n < Gemm::kScoreTiles; ++n)
    for (int c = 0; c < 4; ++c)
      s[(g + c / 2 * 8) * kKeys + 8 * n + 2 * t + c % 2] = scores[0][n][c];

  typename Gemm::Out out;
  for (auto& tile : out[0])
    for (float& x : tile) x = 1.0f;
  const float decay[1][2] = {{0.5f, 2.0f}};  // of rows g and g + 8
  Gemm::accumulate(out, decay, scores, shared_v, head_dim);
  for (int n = 0; n < Gemm::kOutTiles; ++n)
    for (int c = 0; c < 4; ++c) {
      const int column = Gemm::out_column(n, c, t);
      if (column < head_dim) o[(g + c / 2 * 8) * head_dim + column] = out[0][n][c];
    }
}

/// The largest error of the scores, and of the output relative to the largest output.
template <typename Element, int kHeadDim>
void check_products(int head_dim, double tolerance) {
  const auto q = rounded<Element>(random_values(kRows * head_dim, 1));
  const auto k = rounded<Element>(random_values(kKeys * head_dim, 2));
  const auto v = rounded<Element>(random_values(kKeys * head_dim, 3));
  const DeviceArray<Element> device_q(q), device_k(k), device_v(v);
  const DeviceArray<float> device_s(std::vector<float>(kRows * kKeys, kNaN));
  const DeviceArray<float> device_o(std::vector<float>(kRows * head_dim, kNaN));
  constexpr int kShared = (kRows + 2 * kKeys) * kPitch<Element, kHeadDim>;
  const auto kernel = products<Element, kHeadDim>;
  REQUIRE(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared) ==
          cudaSuccess);
  kernel<<<1, kWarpSize, kShared>>>(device_q.data(), device_k.data(), device_v.data(), head_dim,
                                    device_s.data(), device_o.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

  const std::vector<float> s = device_s.values(), o = device_o.values();
  double score_error = 0.0, out_error = 0.0, largest = 0.0;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKeys; ++j) {
      double want = 0.0;
      for (int d = 0; d < head_dim; ++d) {
        want += double(float(q[i * head_dim + d])) * double(float(k[j * head_dim + d]));
      }
      score_error = std::max(score_error, std::abs(s[i * kKeys + j] - want));
      REQUIRE_FALSE(std::isnan(s[i * kKeys + j]));
    }
    for (int d = 0; d < head_dim; ++d) {
      double want = i < 8 ? 0.5 : 2.0;
      for (int j = 0; j < kKeys; ++j) {
        want += double(s[i * kKeys + j]) * double(float(v[j * head_dim + d]));
      }
      out_error = std::max(out_error, std::abs(o[i * head_dim + d] - want));
      largest = std::max(largest, std::abs(want));
      REQUIRE_FALSE(std::isnan(o[i * head_dim + d]));
    }
  }
  CAPTURE(head_dim, score_error, out_error, largest);
  CHECK(score_error <
        2e-5);  // products of halves are exact in float32, and so nearly are split ones
  CHECK(out_error < tolerance * largest);  // here the scores are rounded to Element
}

__global__ void split(const float* x, uint32_t* high, uint32_t* low) {
  split_tf32(x[threadIdx.x], high[threadIdx.x], low[threadIdx.x]);
}

__global__ void merge(const float* lse, float* result) {
  const MergeWeights weights(lse[2 * threadIdx.x], lse[2 * threadIdx.x + 1]);
  result[3 * threadIdx.x] = weights.first;
  result[3 * threadIdx.x + 1] = weights.second;
  result[3 * threadIdx.x + 2] = weights.lse;
}

}  // namespace

TEST_CASE("both products of attention agree with plain loops in every element type and tile") {
  if (!has_device()) return;
  check_products<__half, 64>(64, 1e-3);
  check_products<__half, 96>(72, 1e-3);
  check_products<__nv_bfloat16, 128>(128, 8e-3);
  check_products<__nv_bfloat16, 256>(200, 8e-3);
  check_products<float, 64>(40, 1e-6);
  check_products<float, 96>(96, 1e-6);
  check_products<float, 128>(128, 1e-6);
  check_products<float, 256>(136, 1e-6);
}

TEST_CASE("chunks of a column fall into different banks, and no two chunks into one place") {
  using Copy = TileCopy<__half, 16, 96, kWarpSize>;
  constexpr unsigned kChunksPerRow = Copy::kRowPitch / kChunkBytes;
  std::set<uint32_t> places;
  for (unsigned chunk = 0; chunk < kChunksPerRow; ++chunk) {
    for (unsigned first = 0; first < 16; first += 8) {
      std::set<uint32_t> banks;
      for (unsigned row = first; row < first + 8; ++row) {
        banks.insert(Copy::offset(row, chunk) % kLineBytes);
        places.insert(Copy::offset(row, chunk));
      }
      CHECK(banks.size() == 8);
    }
  }
  CHECK(places.size() == 16 * kChunksPerRow);
  CHECK(*places.rbegin() + kChunkBytes == Copy::kBytes);
}

TEST_CASE("a float32 split for tf32 adds up to itself, and a NaN survives") {
  if (!has_device()) return;
  std::vector<float> x = random_values(32, 4);
  x[0] = 0.0f, x[1] = -1.5f, x[2] = 1e30f, x[3] = -1e-30f, x[4] = kNaN;
  x[5] = 1.99999988f;  // rounds up into the next power of two
  const DeviceArray<float> device_x(x);
  const DeviceArray<uint32_t> device_high(std::vector<uint32_t>(32)),
      device_low(std::vector<uint32_t>(32));
  split<<<1, 32>>>(device_x.data(), device_high.data(), device_low.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const auto high = device_high.values(), low = device_low.values();
  for (int i = 0; i < 32; ++i) {
    float high_value, low_value;
    std::memcpy(&high_value, &high[i], sizeof(float));
    std::memcpy(&low_value, &low[i], sizeof(float));
    CAPTURE(i, x[i], high_value, low_value);
    CHECK((high[i] & 0x1fff) == 0);
    if (std::isnan(x[i])) {
      CHECK(std::isnan(low_value));
    } else {
      CHECK(high_value + low_value == x[i]);
      CHECK(std::abs(low_value) <= std::abs(x[i]) * std::ldexp(1.0f, -11));
    }
  }
}

TEST_CASE("weights of a merge: empty states, far apart ones, infinities and NaN") {
  if (!has_device()) return;
  const std::vector<float> lse = {1.0f,       1.0f,       -kInfinity, 3.0f,   3.0f,
                                  -kInfinity, -kInfinity, -kInfinity, 500.0f, -500.0f,
                                  kNaN,       1.0f,       -kInfinity, kNaN};
  const int cases = static_cast<int>(lse.size()) / 2;
  const DeviceArray<float> device_lse(lse), device_result(std::vector<float>(3 * cases, 7.0f));
  merge<<<1, cases>>>(device_lse.data(), device_result.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const auto result = device_result.values();
  CHECK(result[0] == Approx(0.5));
  CHECK(result[1] == Approx(0.5));
  CHECK(result[2] == Approx(1.0 + std::log(2.0)));
  const std::vector<float> exact(result.begin() + 3, result.begin() + 15);
  CHECK(exact == std::vector<float>{0, 1, 3, 1, 0, 3, 0, 0, -kInfinity, 1, 0, 500});
  for (int i = 15; i < 3 * cases; ++i) CHECK(std::isnan(result[i]));
}
