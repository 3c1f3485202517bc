// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/query_bounds.h"

// Deterministic calls: work tiles of a plane (a KV head of a batch entry) that see the same query
// tiles add to their dq one after the other, in an order that depends on the shapes, the mask and
// the device alone. Plain C++ that host and device code share.
//
// It is the order in which they come there: of an earlier round first, in a round of a cluster of a
// lower number, and by ticket of a lower ticket. A tile that has waited at its start stays as far
// behind, and waits no more.
//
// Each work tile publishes how far it has come. Before a step, it waits for the last earlier one
// that sees the query tile, which has waited for those before it.
//
// No wait is endless: a tile waits for earlier ones only, the first for none, and thread blocks
// that run compute them. Tickets are given in order to thread blocks that run. Without tickets, all
// thread blocks run at one time (the launch is cooperative), and each computes its tiles in order.
// At its end a tile passes all waits for it: so does one of a table that decreases, of which others
// may await query tiles that it does not visit.

namespace ringattn::cuda::sm90 {

/// A work tile to wait for: its index in the plane, twice, plus 1 if it descends.
using AwaitedTile = int;
constexpr AwaitedTile kNoTile = -1;
constexpr AwaitedTile awaited_tile(int index, bool descending) { return 2 * index + descending; }

/// Which work tiles another one waits for.
struct AwaitedTiles {
  int limit = 0;                      // a query tile
  AwaitedTile from_limit = kNoTile;   // at query tiles from limit on
  AwaitedTile below_limit = kNoTile;  // and before
};

/// How far a work tile has come with a step. Rises from step to step, and does not depend on where
/// its query tiles begin or end.
///   last_query_tile  of the call
constexpr int progress_at(int query_tile, int head, int heads, int last_query_tile,
                          bool descending) {
  return (descending ? last_query_tile - query_tile : query_tile) * heads + head + 1;
}

/// Rounds: those of a plane. Cluster c has work tile c of an even round, which descends, and work
/// tile clusters - 1 - c of an odd round, which ascends. For each tile of keys all planes follow.
struct PlaneRounds {
  int clusters;
  int planes;  // of the slice
  int plane;   // of these

  constexpr int round_of(int index) const { return (index * planes + plane) / clusters; }
  /// The lowest index.
  constexpr int first_of(int round) const {
    const int before = round * clusters - plane;
    return before > 0 ? (before + planes - 1) / planes : 0;
  }
};

/// In rounds, without a table: all tiles see up to the last row, and those of lower keys see more.
///   index  of the tile in its plane, of num_key_tiles
constexpr AwaitedTiles awaited_in_rounds(const PlaneRounds& rounds, const QueryBounds& bounds,
                                         int index, int num_key_tiles, int block_q, int block_k) {
  const int round = rounds.round_of(index), round_begin = rounds.first_of(round);
  // The last of the rounds before. Those that ascend have the tiles of higher keys first.
  AwaitedTile last_before = kNoTile;
  if (round_begin > 0) {
    const int before = rounds.round_of(round_begin - 1);
    last_before = before % 2 == 0 ? awaited_tile(round_begin - 1, true)
                                  : awaited_tile(rounds.first_of(before), false);
  }
  if (round % 2 == 0) {
    return {0, index > round_begin ? awaited_tile(index - 1, true) : last_before, kNoTile};
  }
  const int next = index + 1;
  int limit = INT32_MAX;
  if (next < num_key_tiles && rounds.round_of(next) == round) {
    const int begin = bounds.range(next * block_k).begin;
    if (begin < bounds.num_queries) limit = begin / block_q;
  }
  return {limit, awaited_tile(next, false), last_before};
}

/// By ticket, tiles are in the order of their keys, and all descend. The ends of their rows never
/// decrease: what the one before does not see, none before it does.
///   rows_of  the rows that may see a tile of keys
template <typename RowsOf>
constexpr AwaitedTiles awaited_by_ticket(int index, int block_q, const RowsOf& rows_of) {
  while (--index >= 0) {
    const QueryRange rows = rows_of(index);
    if (!rows.empty()) {
      return {(rows.end + block_q - 1) / block_q, kNoTile, awaited_tile(index, true)};
    }
  }
  return {};
}

}  // namespace ringattn::cuda::sm90
