// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <random>
#include <vector>

#include "attention/cuda/query_bounds.h"
#include "catch.h"

using ringattn::BlockAttentionBackwardParams;
using ringattn::cuda::QueryBounds;
using ringattn::cuda::QueryRange;

TEST_CASE("the rows that see a key are those that the forward's rule names") {
  std::mt19937 random(1);
  for (int call = 0; call < 2000; ++call) {
    BlockAttentionBackwardParams p;
    p.num_queries = static_cast<int>(random() % 20);
    p.num_keys = static_cast<int>(random() % 20);
    p.diagonal = static_cast<int>(random() % (p.num_queries + p.num_keys + 1)) - p.num_queries;
    p.first_query = static_cast<int>(random() % (p.num_queries + 1));
    std::vector<int32_t> table;
    for (int i = 0; i < 2 * p.num_keys; ++i) table.push_back(static_cast<int>(random() % 30) - 5);
    if (call % 2 == 0 && p.num_keys > 0) {
      p.query_ranges = table.data();
      p.diagonal = p.first_query = 0;
    }
    const QueryBounds bounds = QueryBounds::of(p);
    for (int key = 0; key < p.num_keys + 3; ++key) {
      const QueryRange rows = bounds.range(key);
      CHECK((rows.begin >= 0 && rows.end <= p.num_queries));
      for (int row = 0; row < p.num_queries; ++row) {
        bool sees = key < p.num_keys;
        if (sees && p.query_ranges != nullptr) {
          sees = row >= table[2 * key] && row < table[2 * key + 1];
        } else if (sees) {
          sees = row >= p.first_query && key - row <= p.diagonal;
        }
        CHECK((row >= rows.begin && row < rows.end) == sees);
      }
    }
  }
}
