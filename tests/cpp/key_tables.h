// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

// Tables of the keys that query rows see (KeySegment::key_ranges), as masks make them.

namespace ringattn::testing {

/// A table, row after row: begin, end.
using KeyTable = std::vector<int32_t>;

/// Row i, at position i + first_position, sees the keys `left` before it to `right` after it.
inline KeyTable window_table(int64_t num_queries, int64_t num_keys, int64_t first_position,
                             int64_t left, int64_t right) {
  KeyTable table;
  for (int64_t row = 0; row < num_queries; ++row) {
    const int64_t position = row + first_position;
    table.push_back(static_cast<int32_t>(std::clamp<int64_t>(position - left, 0, num_keys)));
    table.push_back(static_cast<int32_t>(std::clamp<int64_t>(position + right + 1, 0, num_keys)));
  }
  return table;
}

/// Documents of random lengths up to `max_length`, the same for rows and keys.
inline KeyTable document_table(std::mt19937& random, int64_t num_queries, int64_t num_keys,
                               int64_t max_length, bool causal) {
  KeyTable table;
  for (int64_t row = 0, begin = 0, end = 0; row < num_queries; ++row) {
    if (row == end) {
      begin = end;
      end += 1 + static_cast<int64_t>(random() % max_length);
    }
    table.push_back(static_cast<int32_t>(std::min(begin, num_keys)));
    table.push_back(static_cast<int32_t>(std::min(causal ? row + 1 : end, num_keys)));
  }
  return table;
}

/// Any table whose columns do not decrease: rows that see nothing, gaps, entries beyond the keys.
inline KeyTable random_table(std::mt19937& random, int64_t num_queries, int64_t num_keys) {
  // Steps: few make long runs of equal rows and large jumps.
  const int64_t values = 1 + static_cast<int64_t>(random() % 12);
  std::vector<int32_t> pool(values), begins(num_queries), ends(num_queries);
  const bool fine = random() % 2 == 0;
  const auto key = [&] { return static_cast<int32_t>(random() % (num_keys + 40)) - 20; };
  for (int32_t& value : pool) value = key();
  for (std::vector<int32_t>* column : {&begins, &ends}) {
    for (int32_t& value : *column) value = fine ? key() : pool[random() % values];
    std::sort(column->begin(), column->end());
  }
  // More rows see something where the ends are ahead.
  const int32_t ahead = static_cast<int32_t>(random() % (num_keys + 1));
  KeyTable table;
  for (int64_t row = 0; row < num_queries; ++row) {
    table.push_back(begins[row]);
    table.push_back(ends[row] + ahead);
  }
  return table;
}

/// One of the above.
inline KeyTable any_table(std::mt19937& random, int64_t num_queries, int64_t num_keys) {
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random() % std::max<int64_t>(bound, 1));
  };
  switch (random() % 5) {
    case 0:
      return window_table(num_queries, num_keys, below(num_keys + 1) - num_queries / 2,
                          below(num_keys + 1), below(3) == 0 ? below(200) : 0);
    case 1:
      return document_table(random, num_queries, num_keys, 1 + below(num_queries), true);
    case 2:
      return document_table(random, num_queries, num_keys, 1 + below(num_queries), false);
    case 3:  // all, or nothing
      return window_table(num_queries, num_keys, 0, below(2) == 0 ? num_queries : -num_keys - 1,
                          num_keys);
    default:
      return random_table(random, num_queries, num_keys);
  }
}

/// In device memory.
inline at::Tensor on_device(const KeyTable& table) {
  return at::tensor(table, at::kInt).view({-1, 2}).to(at::kCUDA);
}

}  // namespace ringattn::testing
