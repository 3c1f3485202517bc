// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/query_bounds.h"

// Which query rows see the keys of a tile.

namespace ringattn::cuda::sm90 {

/// Rows that see adjacent keys. Neither column decreases, so the first and the last key say it all.
struct VisibleQueries {
  QueryRange some;  // no row outside it sees any of the keys; a row inside may see none either
  QueryRange all;   // every row of it sees all of the keys
};

/// The rows that see each of keys [first_key, first_key + kCount).
template <int kCount>
__device__ __forceinline__ QueryRange visible_by_all(const QueryBounds& bounds, int first_key) {
  if (first_key + kCount > bounds.num_keys) return {0, 0};
  return {bounds.range(first_key + kCount - 1).begin, bounds.range(first_key).end};
}

/// Of keys [first_key, first_key + kCount). By all lanes of a warp.
template <int kCount>
__device__ __forceinline__ VisibleQueries visible_queries(const QueryBounds& bounds,
                                                          int first_key) {
  // Of a table, keys that no row sees do not count: what they hold of rows means nothing.
  int first = first_key, last = min(first_key + kCount, bounds.num_keys) - 1;
  if (bounds.ranges != nullptr) {
    first = first_key + kCount;
    last = first_key - 1;
#pragma unroll
    for (int i = 0; i < kCount; i += 32) {
      const QueryRange seen = bounds.range(first_key + i + threadIdx.x % 32);
      const uint32_t lanes = __ballot_sync(0xffffffff, !seen.empty());
      if (lanes == 0) continue;
      first = min(first, first_key + i + __ffs(lanes) - 1);
      last = first_key + i + 31 - __clz(lanes);
    }
  }
  if (first > last) return {{0, 0}, {0, 0}};
  return {{bounds.range(first).begin, bounds.range(last).end},
          visible_by_all<kCount>(bounds, first_key)};
}

/// Tiles of adjacent query rows.
struct QueryTiles {
  int begin, end;

  __device__ __forceinline__ bool lack(int tile) const { return tile < begin || tile >= end; }
};

/// Those that have one of these rows.
template <int kBlockQ>
__device__ __forceinline__ QueryTiles tiles_with(const QueryRange& rows) {
  const int begin = rows.begin / kBlockQ;
  return {begin, rows.empty() ? begin : (rows.end + kBlockQ - 1) / kBlockQ};
}

/// Those that have these rows alone. Rows behind the last one have probability 0, and do not count.
template <int kBlockQ>
__device__ __forceinline__ QueryTiles tiles_within(const QueryRange& rows, int num_queries) {
  const auto above = [](int row) { return (row + kBlockQ - 1) / kBlockQ; };
  return {above(rows.begin), rows.end == num_queries ? above(rows.end) : rows.end / kBlockQ};
}

/// The query tiles that attend to some keys. A tile in neither has nothing to do with them.
struct VisibleTiles {
  QueryTiles some;  // a row of the tile may see one of the keys
  QueryTiles all;   // all rows see all of the keys
};

/// Of keys [first_key, first_key + kCount). By all lanes of a warp.
template <int kBlockQ, int kCount>
__device__ __forceinline__ VisibleTiles visible_tiles(const QueryBounds& bounds, int first_key) {
  const VisibleQueries rows = visible_queries<kCount>(bounds, first_key);
  return {tiles_with<kBlockQ>(rows.some), tiles_within<kBlockQ>(rows.all, bounds.num_queries)};
}

}  // namespace ringattn::cuda::sm90
