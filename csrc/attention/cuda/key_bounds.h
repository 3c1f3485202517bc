// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/params.h"

// Which keys of a segment the query rows see. Plain C++ that host and device code share.

namespace ringattn::cuda {

/// Keys [begin, end); none where begin >= end. As a row of KeySegment::key_ranges lies in memory.
struct alignas(8) KeyRange {
  int32_t begin;
  int32_t end;

  /// Whether one of keys [first_key, keys_end) is among them.
  constexpr bool meets(int first_key, int keys_end) const {
    return (begin < first_key ? first_key : begin) < (end < keys_end ? end : keys_end);
  }
};

/// Keys that adjacent query rows see. Both columns of a table never decrease, so the first and the
/// last of the rows say it all.
struct VisibleKeys {
  KeyRange some;  // no row sees a key outside it; a key inside may be seen by no row either
  KeyRange all;   // every row sees every key of it

  /// The same, counted from key `origin` instead of 0.
  constexpr VisibleKeys from(int origin) const {
    return {{some.begin - origin, some.end - origin}, {all.begin - origin, all.end - origin}};
  }
};

/// The keys that each query row sees: KeySegment without the memory of its keys. A table that
/// decreases gives ranges within [0, num_keys], too.
struct KeyBounds {
  int32_t num_keys;
  int32_t diagonal;        // without a table
  int32_t first_query;     // likewise
  const KeyRange* ranges;  // the table, [S_q]; null: none

  static KeyBounds of(const KeySegment& keys) {
    return {keys.num_keys, keys.diagonal, keys.first_query,
            reinterpret_cast<const KeyRange*>(keys.key_ranges)};
  }

  constexpr KeyRange range(int row) const { return clamped(entry(row)); }

  /// range() in two parts, for a load that is waited for later.
  constexpr KeyRange entry(int row) const {
    if (ranges == nullptr) return {0, row < first_query ? 0 : row + 1 + diagonal};
#ifdef __CUDA_ARCH__
    // Through L2: a launch that begins before the previous kernel ends may find old lines in L1.
    const int2 entry = __ldcg(reinterpret_cast<const int2*>(ranges + row));
    return {entry.x, entry.y};
#else
    return ranges[row];
#endif
  }
  constexpr KeyRange clamped(const KeyRange& entry) const {
    return {clamp(entry.begin), clamp(entry.end)};
  }

  /// Of rows [first_row, rows_end), at least one.
  constexpr VisibleKeys visible(int first_row, int rows_end) const {
    const KeyRange first = range(first_row), last = range(rows_end - 1);
    return {{first.begin, last.end}, {last.begin, first.end}};
  }

 private:
  constexpr int32_t clamp(int32_t key) const {
    return key < 0 ? 0 : key < num_keys ? key : num_keys;
  }
};

/// The closed form of KeyBounds where no segment has a table.
struct DiagonalBounds {
  int num_keys;
  int diagonal;
  int first_query;

  /// Number of leading keys that the rows before `rows_end` see. The rows must not cross
  /// `first_query`; `row` is any of them.
  constexpr int visible(int row, int rows_end) const {
    const int end = rows_end + diagonal;
    return row < first_query || end < 0 ? 0 : end < num_keys ? end : num_keys;
  }
  /// The same, in tiles of `block_k` keys.
  constexpr int visible_tiles(int row, int rows_end, int block_k) const {
    return (visible(row, rows_end) + block_k - 1) / block_k;
  }
};

/// Tiles of `block_k` keys, counted from where `visible` is.
struct KeyTiles {
  int begin, end;                    // with keys that a row may see; begin == end: there are none
  int unmasked_begin, unmasked_end;  // of these, the ones that every row sees wholly

  /// keys_above  the highest keys of `visible.all` that no unmasked tile has
  static constexpr KeyTiles of(const VisibleKeys& visible, int block_k, int keys_above = 0) {
    KeyTiles tiles = {};
    if (visible.some.begin >= visible.some.end) return tiles;
    tiles.begin = visible.some.begin / block_k;
    tiles.end = (visible.some.end + block_k - 1) / block_k;
    tiles.unmasked_begin = (visible.all.begin + block_k - 1) / block_k;
    tiles.unmasked_end =
        visible.all.end < keys_above ? 0 : (visible.all.end - keys_above) / block_k;
    if (tiles.unmasked_begin < tiles.begin) tiles.unmasked_begin = tiles.begin;
    if (tiles.unmasked_end > tiles.end) tiles.unmasked_end = tiles.end;
    if (tiles.unmasked_begin >= tiles.unmasked_end) {
      tiles.unmasked_begin = tiles.unmasked_end = tiles.begin;
    }
    return tiles;
  }

  constexpr bool empty() const { return begin == end; }
  constexpr int size() const { return end - begin; }
};

}  // namespace ringattn::cuda
