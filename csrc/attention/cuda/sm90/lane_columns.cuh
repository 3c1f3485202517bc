// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Masks of accumulators (ptx/wgmma.cuh) in bits. One instruction makes predicates of seven bits.

namespace ringattn::cuda::sm90 {

/// Of a lane's first kCount columns of a row, 8 * n and the next one, those in front of `column`: a
/// bit each.
template <int kCount>
__device__ __forceinline__ uint32_t columns_before(int column) {
  static_assert(kCount <= 32);
  const int count = max(min(column / 8 * 2 + min(column % 8, 2), kCount), 0);
  return count < 32 ? (1u << count) - 1 : 0xffffffff;
}

/// Those in [begin, end).
template <int kCount>
__device__ __forceinline__ uint32_t columns_within(int begin, int end) {
  return columns_before<kCount>(end) & ~columns_before<kCount>(begin);
}

}  // namespace ringattn::cuda::sm90
