// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "catch.h"
#include "partition/schedule.h"
#include "schedules.h"

// Which steps need no table of intervals.

using ringattn::Layout;
using ringattn::Partition;
using ringattn::RowRange;
using ringattn::RowSet;
using ringattn::schedule;
using ringattn::Segment;
using ringattn::Visibility;
using ringattn::Visit;
using ringattn::testing::behind_cached_rows;
using ringattn::testing::check_against_brute_force;

TEST_CASE("equal partitions of queries and keys need no table, nor does a call without a mask") {
  const Partition even(Layout::kZigzag, {4, 4}), same(Layout::kZigzag, {4, 4});
  const Partition fewer(Layout::kContiguous, {3, 2});
  for (const Visit& visit : schedule(even, same, 0, {/*causal=*/true})) {
    CHECK(visit.visibility != Visibility::kIntervals);
  }
  for (const Visit& visit : schedule(fewer, even, 0, {/*causal=*/false})) {
    CHECK(visit.visibility == Visibility::kAll);
    CHECK(visit.num_pairs == 12);
  }
}

TEST_CASE("a chunk after a cache needs no table, wherever the cached rows lie") {
  std::mt19937 random(10);
  std::map<Visibility, int> found;
  for (int trial = 0; trial < 1500; ++trial) {
    const int64_t world_size = 1 + random() % 4;
    const Layout layout = trial % 2 == 0 ? Layout::kZigzag : Layout::kContiguous;
    const int64_t before = trial % 5 == 0 ? 0 : random() % 40;
    std::vector<int64_t> lengths, order;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      lengths.push_back(random() % 6 == 0 ? 0 : random() % 12);
      order.push_back(rank);
    }
    std::shuffle(order.begin(), order.end(), random);
    const Partition queries(layout, lengths, order);
    const Partition keys = behind_cached_rows(random, queries, before);
    for (int64_t rank = 0; rank < world_size; ++rank) {
      check_against_brute_force(queries, keys, rank, {/*causal=*/true});
      for (const Visit& visit : schedule(queries, keys, rank, {/*causal=*/true})) {
        CHECK(visit.visibility != Visibility::kIntervals);
        if (visit.visible()) ++found[visit.visibility];
      }
    }
  }
  CHECK(found[Visibility::kAll] > 100);
  CHECK(found[Visibility::kTriangle] > 100);
  CHECK(found[Visibility::kSplit] > 100);
}

TEST_CASE("zigzag: of a block inside its own a rank's head sees the cached rows, its tail all") {
  // 10 cached rows; the chunk's positions 10 .. 17.
  const Partition queries(Layout::kZigzag, {4, 4});
  const Partition keys({{{0, 7}, {10, 12}, {16, 18}}, {{7, 10}, {12, 16}}});
  const auto outer = schedule(queries, keys, 0, {/*causal=*/true});
  CHECK(outer[0].visibility == Visibility::kTriangle);
  CHECK(outer[0].diagonal == 7);
  CHECK(outer[0].final.empty());
  CHECK(outer[1].visibility == Visibility::kSplit);
  CHECK(outer[1].split == 2);
  CHECK(outer[1].early_keys == 3);
  CHECK(outer[1].num_pairs == 2 * 3 + 2 * 7);
  CHECK(outer[1].final == RowRange{0, 4});
  const auto inner = schedule(queries, keys, 1, {/*causal=*/true});
  CHECK(inner[0].diagonal == 3);
  CHECK(inner[1].visibility == Visibility::kAll);
  CHECK(inner[1].keys == RowSet{{0, 9}, {}});
}

TEST_CASE("rows in stripes see triangles, and pieces that are contiguous rectangles") {
  std::vector<std::vector<Segment>> stripes(3);
  for (int64_t token = 0; token < 14; ++token) stripes[token % 3].push_back({token, token + 1});
  for (int64_t rank = 0; rank < 3; ++rank) {
    check_against_brute_force(Partition(stripes), rank, {/*causal=*/true});
    for (const Visit& visit : schedule(Partition(stripes), rank, {/*causal=*/true})) {
      CHECK(visit.visibility == Visibility::kTriangle);
      CHECK(visit.diagonal == 0);
      CHECK(visit.queries.begin == (visit.source > rank ? 1 : 0));
    }
  }
  const Partition contiguous({{{0, 5}}, {{5, 9}}});
  CHECK(schedule(contiguous, 1, {/*causal=*/true})[1].visibility == Visibility::kAll);
}

TEST_CASE("rows that no rectangles and triangles of one launch say need tables in all steps") {
  const auto all_intervals = [](const Partition& queries, const Partition& keys, int64_t rank) {
    check_against_brute_force(queries, keys, rank, {/*causal=*/true});
    const auto visits = schedule(queries, keys, rank, {/*causal=*/true});
    return std::all_of(visits.begin(), visits.end(), [](const Visit& visit) {
      return !visit.visible() || visit.visibility == Visibility::kIntervals;
    });
  };
  // Rows see 0, 2, 2, 4 and 4 keys; 1, 2, 2 and 3 keys; 1, 3 and 4 keys.
  const Partition apart({{{0, 1}, {3, 5}, {7, 9}}, {{1, 3}, {5, 7}}});
  CHECK(all_intervals(apart, apart, 0));
  CHECK(all_intervals(Partition({{{0, 4}}, {}}), Partition({{{0, 2}, {3, 4}}, {{2, 3}}}), 0));
  CHECK(all_intervals(Partition({{{0, 1}, {2, 4}}, {{1, 2}}}), Partition({{{0, 4}}, {}}), 0));
  // Blocks that say it each, from different rows on.
  CHECK(all_intervals(Partition({{{0, 1}, {4, 5}, {9, 10}}, {{1, 4}}, {{5, 9}}}),
                      Partition({{{0, 1}, {4, 5}, {9, 10}}, {{1, 4}}, {{5, 9}}}), 0));
  // A chunk behind rows that some of its queries do not see.
  CHECK(all_intervals(Partition(Layout::kZigzag, {4, 4}), Partition(Layout::kContiguous, {10, 8}),
                      0));
}
