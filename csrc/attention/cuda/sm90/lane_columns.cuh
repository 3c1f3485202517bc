// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Masks of accumulators (ptx/wgmma.cuh) in bits: one instruction turns seven of them into
// predicates.

namespace ringattn::cuda::sm90 {

/// A bit for each of a lane's first kCount columns of a row, 8 * n and the next one for n = 0, 1
/// ...: set where it is in front of `column`.
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
