// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm90/backward/term_parts.cuh"
#include "attention/cuda/sm90/ptx/shared_words.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"

// What each query row adds to its scores, and to its dp. Accumulators have query rows as columns,
// of which a lane has sixteen or more: lanes that read these numbers would take a tenth of what
// shared memory moves in a step. Tensor cores add them instead, as a product of ones with three
// bfloat16 numbers of each row, whose sum is the number to 24 bits.

namespace ringattn::cuda::sm90 {

/// What is added to s, in units of raw scores: -lse / scale. And to dp: -delta.
enum RowTermKind { kLseTerm, kDeltaTerm };

/// A row's numbers: eight of bfloat16, three and a 0 of each kind. Finite unless the row has a NaN:
/// the product with the other kind's zeros must be 0.
constexpr int kRowTermBytes = 16;

// Two columns of the left operand.
constexpr int kTwoOnes = 0x3F803F80, kOneAndZero = 0x00003F80;

/// Left operands in shared memory: for each kind eight rows of eight columns with ones, which stand
/// for all rows, and as many zeros for the other half of a product's K.
constexpr int kOnesBytes = 2 * 2 * 8 * kRowTermBytes;

/// By the threads of a warp.
__device__ __forceinline__ void store_ones(uint32_t to) {
  for (uint32_t i = threadIdx.x % 32; i < kOnesBytes / kRowTermBytes; i += 32) {
    const bool of_score = i < 8, of_dp = i >= 16 && i < 24;
    store_words(to + i * kRowTermBytes, {of_score ? kTwoOnes : 0, of_score ? kOneAndZero : 0,
                                         of_dp ? kTwoOnes : 0, of_dp ? kOneAndZero : 0});
  }
}

/// Note: made visible to the tensor cores by the caller (fence_async_shared).
///   to  16 bytes in shared memory
__device__ __forceinline__ void store_row_terms(uint32_t to, float of_score, float of_dp) {
  const auto packed = [](float first, float second) {
    return static_cast<int>(pack<__nv_bfloat16>(first, second));
  };
  const ThreeParts x(of_score), y(of_dp);
  store_words(to, {packed(x.first, x.second), packed(x.third, 0.0f), packed(y.first, y.second),
                   packed(y.third, 0.0f)});
}

/// The terms of a tile's rows, as a consumer adds them. The left operand has three ones in each
/// row, in the columns of the kind.
template <RowTermKind kKind, bool kOnesInShared>
struct RowTerms;

/// With the left operand in registers.
template <RowTermKind kKind>
struct RowTerms<kKind, false> {
  uint64_t terms;
  uint32_t ones[4];  // the thread's columns 2t and the next one of two rows, and of the other half

  __device__ __forceinline__ RowTerms(uint32_t terms, uint32_t thread)
      : terms(describe_plain_rows(terms, 0, 8 * kRowTermBytes)) {
    const uint32_t of_thread = thread % 4 / 2 != kKind ? 0
                               : thread % 2 == 0       ? kTwoOnes
                                                       : kOneAndZero;
    // Volatile: moves behind the first product would have ptxas fence the others again (C7519).
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("mov.b32 %0, %1;" : "=r"(ones[i]) : "r"(i < 2 ? of_thread : 0));
    }
  }

  template <int kSize>
  __device__ __forceinline__ void add_to(float (&x)[kSize]) const {
    ProductOfTerms<2 * kSize>::issue(x, ones[0], ones[1], ones[2], ones[3], terms);
  }
};

/// With the left operand in shared memory (store_ones): faster where queries come in tiles of 64.
template <RowTermKind kKind>
struct RowTerms<kKind, true> {
  uint64_t terms;
  uint64_t ones;

  __device__ __forceinline__ RowTerms(uint32_t terms, uint32_t ones)
      : terms(describe_plain_rows(terms, 0, 8 * kRowTermBytes)),
        ones(describe_plain_rows(ones + kKind * kOnesBytes / 2, kOnesBytes / 4, 0)) {}

  template <int kSize>
  __device__ __forceinline__ void add_to(float (&x)[kSize]) const {
    ProductOfShared<__nv_bfloat16, 2 * kSize>::template issue<true>(x, ones, terms);
  }
};

}  // namespace ringattn::cuda::sm90
