// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ringattn::cpu {

/// An interval of keys for each row, or of rows for each key; both bounds never decrease. Those
/// that begin >= end are empty.
struct Intervals {
  std::vector<int64_t> begin, end;

  int64_t size() const { return static_cast<int64_t>(begin.size()); }
  bool empty(int64_t i) const { return begin[i] >= end[i]; }
};

/// Those of a table int32 [N, 2], contiguous, clamped to [0, limit].
Intervals intervals_of(const at::Tensor& table, int64_t limit);

/// A run of intervals that are computed together.
struct IntervalChunk {
  int64_t end = 0;                       // of the run
  int64_t hull_begin = 0, hull_end = 0;  // that holds its intervals; none: hull_begin >= hull_end
};

/// The chunk that begins with interval `first`, of at most `max_size`.
IntervalChunk chunk_of(const Intervals& intervals, int64_t first, int64_t max_size);

}  // namespace ringattn::cpu
