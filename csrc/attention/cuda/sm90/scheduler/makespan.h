// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"

// The schedule of a persistent kernel: work tiles in a list, each taken, in order, by the worker (a
// cluster of thread blocks) that is free first. That is list scheduling (Graham, "Bounds on
// multiprocessing timing anomalies", 1969), and with tiles from long to short its LPT rule.

namespace ringattn {

/// Times are in any unit.
struct WorkTile {
  int duration;
  int earliest_end = 0;  // whenever it starts: its keys arrive while other tiles are computed
};

/// The time until all tiles are done.
RINGATTN_API int64_t makespan(const std::vector<WorkTile>& tiles, int64_t num_workers);

/// An order of the last tiles, at most `max_tail`, with a smaller makespan, found by a local
/// search: with few long tiles for each worker, the last worker to end otherwise has a good part of
/// a tile left when the others find none. The i-th of the tail is tile tiles.size() - result.size()
/// + result[i]. Empty where the gain would be 1 / 200 or less.
RINGATTN_API std::vector<uint16_t> rebalance_tail(const std::vector<WorkTile>& tiles,
                                                  int64_t num_workers, int64_t max_tail);

/// The same with the longest tiles first, without a search: for durations that are estimates, which
/// an order must not fit too closely. Empty where tiles would end later.
RINGATTN_API std::vector<uint16_t> longest_first_tail(const std::vector<WorkTile>& tiles,
                                                      int64_t num_workers, int64_t max_tail);

/// The tiles with their tail in the order that rebalance_tail found.
RINGATTN_API std::vector<WorkTile> with_tail_order(const std::vector<WorkTile>& tiles,
                                                   const std::vector<uint16_t>& order);

}  // namespace ringattn
