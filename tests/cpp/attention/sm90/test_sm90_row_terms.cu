// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "accumulators.cuh"
#include "attention/cuda/sm90/backward/row_terms.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "catch.h"
#include "device.h"

// What a tile's query rows add to its scores or to dp. Terms of 20 bits need all three parts, and
// their sums with small numbers are exact in float32.

namespace {

using namespace ringattn::cuda::sm90;

constexpr int kThreads = 128, kKeys = 64;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// x[key][row] += terms[kKind][row].
///   x      [kKeys, kN]
///   terms  [2, kN]
template <int kN, bool kOnesInShared, RowTermKind kKind>
__global__ void __launch_bounds__(kThreads, 1) add_terms(float* x, const float* terms) {
  __shared__ __align__(16) unsigned char shared[kOnesBytes + kN * kRowTermBytes];
  const uint32_t ones = shared_address(shared), rows = ones + kOnesBytes;
  if (threadIdx.x < 32) store_ones(ones);
  for (int row = threadIdx.x; row < kN; row += kThreads) {
    store_row_terms(rows + row * kRowTermBytes, terms[row], terms[kN + row]);
  }
  fence_async_shared();
  __syncthreads();

  float sums[kN / 2];
  read_accumulators<kN>(sums, x);
  const RowTerms<kKind, kOnesInShared> row_terms(rows, kOnesInShared ? ones : threadIdx.x);
  begin_products();
  row_terms.add_to(sums);
  commit_products();
  wait_for_products<0>();
  write_accumulators<kN>(sums, x);
}

template <int kN, bool kOnesInShared, RowTermKind kKind>
void check(const std::vector<float>& before, const std::vector<float>& terms) {
  CAPTURE(kKind);
  const DeviceArray<float> x(before), device_terms(terms);
  add_terms<kN, kOnesInShared, kKind><<<1, kThreads>>>(x.data(), device_terms.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const std::vector<float> sums = x.values();
  for (size_t i = 0; i < sums.size(); ++i) {
    CAPTURE(i);
    const size_t row = i % kN;
    if (std::isnan(terms[row])) {
      REQUIRE(std::isnan(sums[i]));
    } else {
      REQUIRE(sums[i] == before[i] + terms[kKind * kN + row]);
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE_SIG("sm90: each query row adds its terms to its scores and to its dp", "",
                       ((int kN, bool kOnesInShared), kN, kOnesInShared), (64, true), (64, false),
                       (128, true), (128, false)) {
  if (!has_hopper()) return;
  std::mt19937 random(kN);
  std::uniform_int_distribution<int> small(-31, 31), large(-(1 << 19), 1 << 19);
  std::vector<float> before(kKeys * kN), terms(2 * kN);
  for (float& x : before) x = small(random) / 8.0f;
  for (float& x : terms) x = large(random) / 8.0f;
  terms[3] = kNaN;  // a row whose lse is one: its dp, too, is of no use
  check<kN, kOnesInShared, kLseTerm>(before, terms);
  check<kN, kOnesInShared, kDeltaTerm>(before, terms);
}
