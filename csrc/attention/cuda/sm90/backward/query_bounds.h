// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/params.h"

// Which query rows see a key: key_bounds.h from the keys' side.

namespace ringattn::cuda::sm90 {

/// Rows [begin, end); none where begin >= end. As a row of query_ranges lies in memory.
struct alignas(8) QueryRange {
  int32_t begin;
  int32_t end;
};

/// Rows that see adjacent keys. Neither column decreases, so the first and the last key say it all.
struct VisibleQueries {
  QueryRange some;  // no row outside it sees any of the keys; a row inside may see none either
  QueryRange all;   // every row of it sees all of the keys
};

struct QueryBounds {
  int num_queries;
  int num_keys;
  int diagonal;              // without a table
  int first_query;           // likewise
  const QueryRange* ranges;  // the table, [S_k]; null: none

  static QueryBounds of(const BlockAttentionBackwardParams& p) {
    return {p.num_queries, p.num_keys, p.diagonal, p.first_query,
            reinterpret_cast<const QueryRange*>(p.query_ranges)};
  }

  /// A key that does not exist is seen by no row.
  __device__ __forceinline__ QueryRange range(int key) const {
    if (key >= num_keys) return {0, 0};
    if (ranges == nullptr) return {clamp(max(first_query, key - diagonal)), num_queries};
    const int2 entry = __ldg(reinterpret_cast<const int2*>(ranges + key));
    return {clamp(entry.x), clamp(entry.y)};
  }

  /// Of keys [first_key, first_key + kCount), the first of which exists. By all lanes of a warp.
  template <int kCount>
  __device__ __forceinline__ VisibleQueries visible(int first_key) const {
    // Of a table, keys that no row sees do not count: what they hold of rows means nothing.
    int first = first_key, last = min(first_key + kCount, num_keys) - 1;
    if (ranges != nullptr) {
      first = first_key + kCount;
      last = first_key - 1;
#pragma unroll
      for (int i = 0; i < kCount; i += 32) {
        const QueryRange seen = range(first_key + i + threadIdx.x % 32);
        const uint32_t lanes = __ballot_sync(0xffffffff, seen.begin < seen.end);
        if (lanes == 0) continue;
        first = min(first, first_key + i + __ffs(lanes) - 1);
        last = first_key + i + 31 - __clz(lanes);
      }
    }
    if (first > last) return {{0, 0}, {0, 0}};
    VisibleQueries visible = {{range(first).begin, range(last).end}, {0, 0}};
    if (first_key + kCount <= num_keys) {
      visible.all = {range(first_key + kCount - 1).begin, range(first_key).end};
    }
    return visible;
  }

 private:
  __device__ __forceinline__ int clamp(int row) const { return min(max(row, 0), num_queries); }
};

}  // namespace ringattn::cuda::sm90
