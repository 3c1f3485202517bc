// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace ringattn {

/// Visible pairs of a query row and a key row: of query rows [query_begin, query_end) and key rows
/// [key_begin, key_end), those with lower <= j - i <= upper, where i and j count from the band's
/// first rows. lower <= upper.
struct Band {
  /// A limit that no j - i reaches.
  static constexpr int64_t kUnlimited = int64_t{1} << 62;

  int64_t query_begin = 0, query_end = 0;
  int64_t key_begin = 0, key_end = 0;
  int64_t lower = -kUnlimited;
  int64_t upper = kUnlimited;

  int64_t num_queries() const { return query_end - query_begin; }
  int64_t num_keys() const { return key_end - key_begin; }
  bool has_lower() const { return lower > 1 - num_queries(); }
  bool has_upper() const { return upper < num_keys() - 1; }
  bool sees(int64_t query, int64_t key) const {
    const int64_t i = query - query_begin, j = key - key_begin;
    return i >= 0 && query < query_end && j >= 0 && key < key_end && lower <= j - i &&
           j - i <= upper;
  }
  /// Operations of attention are counted by these; the planner adds the padding of tiles.
  int64_t num_pairs() const { return pairs_up_to(upper) - pairs_up_to(lower - 1); }

  /// All of these rows, where there is a diagonal under it, as in torch.tril.
  static Band whole(int64_t num_queries, int64_t num_keys, std::optional<int64_t> diagonal = {}) {
    return {0, num_queries, 0, num_keys, -kUnlimited, diagonal.value_or(kUnlimited)};
  }

 private:
  // Pairs with j - i <= diagonal.
  int64_t pairs_up_to(int64_t diagonal) const {
    const int64_t last = std::clamp(diagonal, -num_queries(), num_keys());
    return keys_of_rows(num_queries() + last) - keys_of_rows(last);
  }

  // The sum of min(x, num_keys) for x = 1 .. `end`; 0 for `end` below 1.
  int64_t keys_of_rows(int64_t end) const {
    const int64_t rising = std::clamp<int64_t>(end, 0, num_keys());
    return rising * (rising + 1) / 2 + std::max<int64_t>(0, end - rising) * num_keys();
  }
};

}  // namespace ringattn
