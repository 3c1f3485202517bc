// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/intervals.h"

#include <algorithm>

namespace ringattn::cpu {

Intervals intervals_of(const at::Tensor& table, int64_t limit) {
  const auto* bounds = table.const_data_ptr<int32_t>();
  Intervals intervals;
  for (int64_t i = 0; i < table.size(0); ++i) {
    intervals.begin.push_back(std::max<int64_t>(bounds[2 * i], 0));
    intervals.end.push_back(std::min<int64_t>(bounds[2 * i + 1], limit));
  }
  return intervals;
}

IntervalChunk chunk_of(const Intervals& intervals, int64_t first, int64_t max_size) {
  // How far bounds of one chunk may lie apart: in a forward a NaN in a value reaches rows that see
  // a key so close.
  constexpr int64_t kSpread = 256;
  IntervalChunk chunk = {first, 0, 0};
  int64_t first_end = 0;  // of those that are not empty
  for (; chunk.end < std::min(first + max_size, intervals.size()); ++chunk.end) {
    if (intervals.empty(chunk.end)) continue;
    const int64_t begin = intervals.begin[chunk.end], end = intervals.end[chunk.end];
    if (chunk.hull_begin >= chunk.hull_end) {
      chunk.hull_begin = begin;
      first_end = end;
    } else if (begin > chunk.hull_begin + kSpread || end > first_end + kSpread) {
      break;
    }
    chunk.hull_end = end;
  }
  return chunk;
}

}  // namespace ringattn::cpu
