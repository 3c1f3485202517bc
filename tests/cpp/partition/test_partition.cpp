// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <random>
#include <stdexcept>

#include "catch.h"
#include "partition/partition.h"

using ringattn::Layout;
using ringattn::Partition;

namespace {

Partition random_partition(std::mt19937& random, Layout layout) {
  std::vector<int64_t> lengths(1 + random() % 6);
  for (int64_t& length : lengths) length = random() % 4 == 0 ? 0 : random() % 20;
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return Partition(layout, lengths, order);
}

}  // namespace

TEST_CASE("every position has exactly one owner") {
  std::mt19937 random(1);
  for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
    for (int trial = 0; trial < 200; ++trial) {
      const Partition partition = random_partition(random, layout);
      std::vector<int> owners(partition.seq_len(), 0);
      for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
        int64_t owned = 0, last = -1;
        for (const auto& [begin, end] : partition.segments(rank)) {
          CHECK(begin > last);
          for (int64_t position = begin; position < end; ++position) ++owners.at(position);
          owned += end - begin;
          last = begin;
        }
        CHECK(owned == partition.length(rank));
      }
      CHECK(std::count(owners.begin(), owners.end(), 1) == partition.seq_len());
    }
  }
}

TEST_CASE("a zigzag rank owns a head segment and its mirror image") {
  const Partition partition(Layout::kZigzag, {4, 6, 2});
  const auto segments = partition.segments(1);
  REQUIRE(segments.size() == 2);
  CHECK(segments[0].begin == 2);
  CHECK(segments[0].end == 5);
  CHECK(segments[1].begin == 12 - 5);
  CHECK(segments[1].end == 12 - 2);
}

TEST_CASE("the first rank of the order is outermost") {
  const Partition partition(Layout::kZigzag, {2, 4}, {1, 0});
  CHECK(partition.segments(1)[0].begin == 0);
  CHECK(partition.segments(0)[0].begin == 2);
  CHECK(partition.rank_after(1, 1) == 0);
  CHECK(partition.rank_after(1, -1) == 0);
  CHECK(partition.rank_after(0, 2) == 0);
}

TEST_CASE("what is not a partition is refused") {
  CHECK_THROWS_AS(Partition(Layout::kZigzag, {}), std::invalid_argument);
  CHECK_THROWS_AS(Partition(Layout::kZigzag, {3, -1}), std::invalid_argument);
  CHECK_THROWS_AS(Partition(Layout::kZigzag, {3, 1}, {0}), std::invalid_argument);
  CHECK_THROWS_AS(Partition(Layout::kZigzag, {3, 1}, {0, 0}), std::invalid_argument);
  CHECK_THROWS_AS(Partition(Layout::kZigzag, {3, 1}, {0, 2}), std::invalid_argument);
  CHECK_THROWS_AS(ringattn::parse_layout("striped"), std::invalid_argument);
}
