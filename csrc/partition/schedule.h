// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "partition/partition.h"

namespace ringattn {

/// One step of a rank's schedule: which of its rows attend to which rows of a block.
struct Visit {
  int64_t source = 0;  // the rank that owns the block

  // Query rows [query_begin, S_r) attend to key rows [0, key_end) of the block under `diagonal`,
  // which counts from those rows. Nothing visible: query_begin == query_end and key_end == 0.
  int64_t query_begin = 0;
  int64_t query_end = 0;
  int64_t key_end = 0;
  std::optional<int64_t> diagonal;  // absent: each of those rows sees each of those keys

  // Rows [final_begin, final_end) of this rank attend to no later block: their result is complete.
  int64_t final_begin = 0;
  int64_t final_end = 0;

  int64_t num_queries() const { return query_end - query_begin; }
  bool visible() const { return num_queries() > 0; }
  /// Pairs of a query and a visible key: a rectangle, or a triangle under a diagonal.
  int64_t num_pairs() const {
    return diagonal ? num_queries() * (num_queries() + 1) / 2 : num_queries() * key_end;
  }
};

/// The schedule of `rank`: one visit for each step, with the block of Partition::source_at, also
/// where nothing is visible. Every visit is one call, dense or under one diagonal: nothing masked
/// is computed.
RINGATTN_API std::vector<Visit> schedule(const Partition& partition, int64_t rank, bool causal);

/// The schedules of all ranks, [W][W].
using Schedules = std::vector<std::vector<Visit>>;
Schedules schedules(const Partition& partition, bool causal);

/// Leading key rows of the block of `source` that the schedule of `rank` uses.
RINGATTN_API int64_t rows_used(const Partition& partition, int64_t rank, int64_t source,
                               bool causal);

}  // namespace ringattn
