// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/params.h"

// Which query rows see the keys of a block: key_bounds.h transposed. Plain C++ that host and device
// code share.

namespace ringattn::cuda {

/// Rows [begin, end); none where begin >= end. As a key's entry of
/// BlockAttentionBackwardParams::query_ranges lies in memory.
struct alignas(8) QueryRange {
  int32_t begin;
  int32_t end;

  constexpr bool empty() const { return begin >= end; }
};

/// The rows that see each key. A table that decreases gives ranges within [0, num_queries], too.
struct QueryBounds {
  int32_t num_queries;
  int32_t num_keys;
  int32_t diagonal;          // without a table
  int32_t first_query;       // likewise
  const QueryRange* ranges;  // the table, [S_k]; null: none

  static constexpr QueryBounds of(const BlockAttentionBackwardParams& p) {
    return {p.num_queries, p.num_keys, p.diagonal, p.first_query,
            static_cast<const QueryRange*>(static_cast<const void*>(p.query_ranges))};
  }

  /// What the host knows of them: ranges of a table, which it does not, count as whole.
  static constexpr QueryBounds on_host(const BlockAttentionBackwardParams& p) {
    if (p.query_ranges != nullptr) return {p.num_queries, p.num_keys, p.num_keys, 0, nullptr};
    return of(p);
  }

  /// Of any key from 0 on; keys past the last one are seen by no row.
  constexpr QueryRange range(int key) const { return clamped(entry(key)); }

  /// range() in two parts, for a load that is waited for later.
  constexpr QueryRange entry(int key) const {
    if (key >= num_keys) return {num_queries, num_queries};
    if (ranges == nullptr) {
      const int first = key - diagonal;  // at most S_k + S_q
      return {first > first_query ? first : first_query, num_queries};
    }
#ifdef __CUDA_ARCH__
    // Through L2: a launch that begins before the previous kernel ends may find old lines in L1.
    const int2 entry = __ldcg(reinterpret_cast<const int2*>(ranges + key));
    return {entry.x, entry.y};
#else
    return ranges[key];
#endif
  }
  constexpr QueryRange clamped(const QueryRange& entry) const {
    return {clamp(entry.begin), clamp(entry.end)};
  }

 private:
  constexpr int32_t clamp(int32_t row) const {
    const int32_t from_0 = row > 0 ? row : 0;
    return from_0 < num_queries ? from_0 : num_queries;
  }
};

}  // namespace ringattn::cuda
