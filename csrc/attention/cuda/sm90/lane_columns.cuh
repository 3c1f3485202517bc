// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

// Masks of accumulators (ptx/wgmma.cuh) in bits: one instruction turns seven of them into
// predicates.

namespace ringattn::cuda::sm90 {

/// A bit for each of a lane's first kCount columns of a row, 8 * n and the next one for n = 0, 1
/// ...: set where it is in front of `column`.
template <int kCount>
__device__ __forceinline__ uint32_t columns_before(int column) {
  static_assert(kCount <= 32);
  // Also of a negative column: shifts round down.
  const int count = max(min((column >> 3) * 2 + min(column & 7, 2), kCount), 0);
  // A shift by 32 needs a wider type. Where a count of 32 is tested for instead, ptxas 13.0 reuses
  // a predicate of the clamp, which is another one.
  using Bits = std::conditional_t<kCount == 32, uint64_t, uint32_t>;
  return static_cast<uint32_t>((Bits{1} << count) - 1);
}

/// Those in [begin, end).
template <int kCount>
__device__ __forceinline__ uint32_t columns_within(int begin, int end) {
  return columns_before<kCount>(end) & ~columns_before<kCount>(begin);
}

}  // namespace ringattn::cuda::sm90
