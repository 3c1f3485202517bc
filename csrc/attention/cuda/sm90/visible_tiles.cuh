// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/key_bounds.h"
#include "attention/cuda/sm90/kernel_params.h"
#include "core/hop_plan.h"

// A query tile, and the tiles of keys that its rows see.

namespace ringattn::cuda::sm90 {

/// The query tile of one thread block: rows of one head.
struct QueryTile {
  int first_row;      // negative: there are no more tiles
  int rows_end;       // first_row or less: the second row tile of a pair, without rows
  int work_tile_end;  // end of the cluster's rows, all of which process the same keys
  int batch;
  int head;
  uint32_t state_parity;  // of the barrier state_full, if a state is loaded

  __device__ __forceinline__ bool exists() const { return first_row >= 0; }
};

/// Tiles of keys visible to rows of the work tile up to `rows_end`.
template <typename Tile>
__device__ __forceinline__ int visible_key_tiles(const DiagonalBounds& keys, const QueryTile& tile,
                                                 int rows_end) {
  // A row that exists. The first one does in unpaired tiles, where it makes their loops shorter.
  const int row = Tile::kInPairs ? tile.work_tile_end - 1 : tile.first_row;
  return keys.visible_tiles(row, rows_end, Tile::kBlockK);
}

/// A segment's tiles of keys, counted from the first, as the 64 rows of a consumer see them.
struct VisibleTiles {
  int tiles;     // visible to the work tile
  int own;       // visible to any of the 64 rows
  int unmasked;  // wholly visible to all of the 64 rows
};

///   first_row  of the 64; `own` and `unmasked` are undefined if none of them exists
template <typename Tile>
__device__ __forceinline__ VisibleTiles visible_tiles(const DiagonalBounds& keys,
                                                      const QueryTile& tile, int first_row) {
  const int by_first = min(keys.num_keys, first_row + 1 + keys.diagonal);
  return {visible_key_tiles<Tile>(keys, tile, tile.work_tile_end),
          visible_key_tiles<Tile>(keys, tile, min(first_row + kConsumerRows, tile.rows_end)),
          max(by_first, 0) / Tile::kBlockK};
}

/// The first segment from `segment` on with keys visible to the work tile.
template <typename Tile, int kSegments>
__device__ __forceinline__ int visible_segment(
    const SegmentedParams<kSegments, Variant::kDiagonal>& p, const QueryTile& tile, int segment) {
  while (segment < p.num_segments &&
         visible_key_tiles<Tile>(p.keys[segment], tile, tile.work_tile_end) == 0) {
    ++segment;
  }
  return segment;
}

// The same for general variants. Their row tiles are never in pairs: the rows of a work tile begin
// with `first_row` of each of its thread blocks.

/// The keys of a segment that rows of the work tile see.
__device__ __forceinline__ VisibleKeys visible_keys(const KeyBounds& keys, const QueryTile& tile) {
  return keys.visible(tile.first_row, tile.work_tile_end);
}

/// The segments with keys that the work tile may see, a bit for each. A single one is not asked:
/// its tiles, which are read next, are none where nothing is visible.
template <int kSegments, Variant kVariant>
__device__ __forceinline__ uint32_t visible_segments(const SegmentedParams<kSegments, kVariant>& p,
                                                     const QueryTile& tile) {
  static_assert(kSegments <= 32);
  if (kSegments == 1 || p.num_segments == 1) return p.num_segments;
  uint32_t segments = 0;
#pragma unroll 4
  for (int segment = 0; segment < p.num_segments; ++segment) {
    const KeyRange some = visible_keys(p.keys[segment], tile).some;
    segments |= static_cast<uint32_t>(some.begin < some.end) << segment;
  }
  return segments;
}

/// The first of these; there is one.
template <int kSegments>
__device__ __forceinline__ int first_segment(uint32_t segments) {
  return kSegments == 1 ? 0 : __ffs(segments) - 1;
}

/// The key from which a work tile counts its tiles of keys. With a single segment that is the first
/// one that it sees, so that no lower end of documents needs a mask. Under a window consumers come
/// to their first keys at distances of kConsumerRows; from kAhead before, all of them do so in the
/// first rows of a tile. There are no more tiles for that. With several segments it costs more than
/// it saves.
template <typename Tile, int kSegments>
__device__ __forceinline__ int origin_of_tiles(const VisibleKeys& visible) {
  constexpr int kAhead = (Tile::kConsumers - 1) * (Tile::kBlockK - kConsumerRows);
  static_assert(kSegments > 1 || (kAhead >= 0 && kAhead < Tile::kBlockK));
  if (kSegments > 1) return 0;
  const KeyRange& some = visible.some;
  if (some.begin >= visible.all.begin) return some.begin;
  const int left = Tile::kBlockK - 1 - (max(some.end - some.begin, 1) - 1) % Tile::kBlockK;
  return max(some.begin - min(kAhead, left), 0);
}

/// A segment's tiles of keys that the work tile sees, as one consumer comes to them: the last
/// first.
struct ConsumerTiles {
  int above;     // tiles before those that the consumer's rows see
  KeyTiles own;  // of every row of an unmasked tile, a higher tile has a key that it sees, too
  int below;     // tiles after them
  int near_begin, near_end;  // tiles whose keys are at most kNearKeys from keys that each row sees
  bool disjoint;  // no key is seen by all rows: one may see none, and no tile is near then
  // All that rows see of the highest tile are its first kPartKeys; of the lowest one its last.
  bool ends_early, begins_late;
};

/// The keys of a product of a part of a tile: about half of them, a multiple of 16.
template <typename Tile>
constexpr int kPartKeys = (Tile::kBlockK + 31) / 32 * 16;

/// A value that is not finite may reach rows that see a key so near. Beyond, it may not.
constexpr int kNearKeys = 512;
static_assert(kNearKeys <= kRowsAtGaps);

/// The keys of a segment that a consumer's rows see; none where none of the rows exists.
__device__ __forceinline__ VisibleKeys consumer_keys(const KeyBounds& keys, const QueryTile& tile,
                                                     int consumer) {
  const int first_row = tile.first_row + consumer * kConsumerRows;
  if (first_row >= tile.rows_end) return {};
  return keys.visible(first_row, min(first_row + kConsumerRows, tile.rows_end));
}

///   some     outside, no row of the work tile sees a key
///   visible  of the consumer's rows; both counted from origin_of_tiles()
template <typename Tile>
__device__ __forceinline__ ConsumerTiles consumer_tiles(const KeyRange& some,
                                                        const VisibleKeys& visible) {
  const KeyTiles all = KeyTiles::of({some, {}}, Tile::kBlockK);
  ConsumerTiles tiles = {all.size(), {}, 0, 0, 0, false, false, false};
  KeyTiles own = KeyTiles::of(visible, Tile::kBlockK, /*keys_above=*/1);
  // Of a table that decreases they may not be among the work tile's.
  own.begin = max(own.begin, all.begin);
  own.end = min(own.end, all.end);
  if (own.begin >= own.end) return tiles;
  own.unmasked_begin = max(own.unmasked_begin, own.begin);
  own.unmasked_end = max(own.unmasked_end, own.begin);
  const bool both_see =
      visible.some.begin < visible.all.end && visible.all.begin < visible.some.end;
  const int near_begin = max(visible.all.begin - kNearKeys + Tile::kBlockK - 1, 0) / Tile::kBlockK;
  const int near_end = both_see ? (visible.all.end + kNearKeys) / Tile::kBlockK : 0;
  const KeyRange& keys = visible.some;
  return {all.end - own.end,
          own,
          own.begin - all.begin,
          near_begin,
          near_end,
          visible.all.begin >= visible.all.end,
          keys.end <= (own.end - 1) * Tile::kBlockK + kPartKeys<Tile>,
          keys.begin >= (own.begin + 1) * Tile::kBlockK - kPartKeys<Tile>};
}

/// The keys of a segment that each of a lane's two rows sees, to be clamped. Rows that do not exist
/// see those of the last one that does: their scores must not ask for new maxima in unmasked tiles.
__device__ __forceinline__ void load_ranges(const KeyBounds& keys, const QueryTile& tile,
                                            int lane_row, KeyRange (&seen)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    seen[half] = keys.entry(min(tile.first_row + lane_row + 8 * half, tile.rows_end - 1));
  }
}

}  // namespace ringattn::cuda::sm90
