// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/ptx/wgmma.cuh"

// The product behind scores, of the forward and of the backward.

namespace ringattn::cuda::sm90 {

/// Issues a group of products: s = a @ b.T, of 64 rows of a with 2 * kSize rows of b.
///   kBytesA, kBytesB  from 64 columns of a tile to the next 64
///   add_more          issues products that add to s
template <typename Element, int kHeadDim, int kBytesA, int kBytesB, int kSize, typename AddMore>
__device__ __forceinline__ void issue_score_product(float (&s)[kSize], uint32_t a, uint32_t b,
                                                    const AddMore& add_more) {
  using Product = ProductOfShared<Element, 2 * kSize>;
  const auto of_a = OperandDescriptor::k_major(a), of_b = OperandDescriptor::k_major(b);
  begin_products();
  Product::template issue<false>(s, of_a.at(0), of_b.at(0));
#pragma unroll
  for (int step = 1; step < kHeadDim / 16; ++step) {
    const int block = step / 4, offset = step % 4 * 32;  // 16 columns are 32 bytes
    Product::template issue<true>(s, of_a.at(block * kBytesA + offset),
                                  of_b.at(block * kBytesB + offset));
  }
  add_more();
  commit_products();
}

template <typename Element, int kHeadDim, int kBytesA, int kBytesB, int kSize>
__device__ __forceinline__ void issue_score_product(float (&s)[kSize], uint32_t a, uint32_t b) {
  issue_score_product<Element, kHeadDim, kBytesA, kBytesB>(s, a, b, [] {});
}

}  // namespace ringattn::cuda::sm90
