// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "catch.h"
#include "partition/schedule.h"
#include "partition/visit_order.h"
#include "schedules.h"

using ringattn::BlockRows;
using ringattn::Layout;
using ringattn::Mask;
using ringattn::Partition;
using ringattn::RowRange;
using ringattn::RowSet;
using ringattn::schedule;
using ringattn::Segment;
using ringattn::Visit;
using ringattn::testing::append;
using ringattn::testing::behind_cached_rows;
using ringattn::testing::check_against_brute_force;
using ringattn::testing::key_ranges;
using ringattn::testing::random_lengths;
using ringattn::testing::random_mask;
using ringattn::testing::random_partition;
using ringattn::testing::random_pieces;

TEST_CASE("a row's interval of any block holds what it sees, under any mask and partition") {
  std::mt19937 random(6);
  for (int trial = 0; trial < 2000; ++trial) {
    const Partition partition =
        trial % 3 == 0 ? random_pieces(random)
                       : Partition(trial % 3 == 1 ? Layout::kZigzag : Layout::kContiguous,
                                   random_lengths(random));
    const Mask mask = random_mask(random, partition.seq_len());
    for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
      check_against_brute_force(partition, rank, mask);
    }
  }
}

TEST_CASE("queries that are the last of more keys see what they see, over other partitions") {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t world_size = 1 + random() % 5, num_keys = random() % 50;
    const int64_t num_queries = trial % 7 == 0 ? num_keys : random() % (num_keys + 1);
    const Partition keys = random_partition(random, world_size, num_keys);
    const Partition queries =
        trial % 14 == 0 ? keys : random_partition(random, world_size, num_queries);
    const Mask mask = trial % 4 == 0 ? Mask{trial % 8 == 0} : random_mask(random, keys.seq_len());
    for (int64_t rank = 0; rank < world_size; ++rank) {
      check_against_brute_force(queries, keys, rank, mask);
    }
  }
}

TEST_CASE("a rank without keys gets the blocks, and one without queries sends its own") {
  const Partition queries(Layout::kContiguous, {0, 3, 0}), keys(Layout::kContiguous, {5, 0, 0});
  const auto visits = schedule(queries, keys, 1, {/*causal=*/true});
  CHECK(visits[0].num_pairs == 0);
  CHECK(visits[1].source == 0);
  CHECK(visits[1].num_pairs == 3 + 4 + 5);
  const auto hops = ringattn::plan_hops(queries, keys, 0, {/*causal=*/true});
  CHECK(hops[0].destination == 1);
  CHECK(hops[0].sent == RowSet{{0, 5}, {}});
}

TEST_CASE("long stretches of a block that no row sees do not travel, their edges do") {
  std::mt19937 random(9);
  int64_t num_gaps = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t world_size = 2 + random() % 3;
    std::vector<std::vector<Segment>> pieces(world_size);
    std::vector<int64_t> documents = {0};
    int64_t seq_len = 0;
    for (int piece = 0; piece < 12; ++piece) {
      const int64_t end = seq_len + 1 + random() % (random() % 2 == 0 ? 200 : 3000);
      append(pieces[random() % world_size], {seq_len, end});
      if (random() % 2 == 0) documents.push_back(seq_len + random() % (end - seq_len));
      seq_len = end;
    }
    documents.push_back(seq_len);
    Mask mask = {/*causal=*/random() % 2 == 0, -1, -1, {}};
    if (trial % 3 != 0) mask.cu_seqlens = documents;
    if (trial % 3 != 1) mask.window_left = random() % 400;
    if (trial % 3 != 1 && !mask.causal) mask.window_right = random() % 400;
    const Partition partition(pieces);
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const BlockRows queries = ringattn::query_rows(partition, partition, rank);
      for (const Visit& visit : schedule(partition, rank, mask)) {
        if (!visit.visible()) continue;
        const BlockRows block = partition.rows(visit.source), part = block.part(visit.keys);
        REQUIRE(part.size() == visit.keys.size());
        // Rows of the block, those that a query sees.
        const auto ranges = key_ranges(queries, block, mask, seq_len);
        std::vector<bool> seen(block.size(), false);
        for (size_t i = 0; i < ranges.size(); i += 2) {
          for (int64_t key = ranges[i]; key < ranges[i + 1]; ++key) seen[key] = true;
        }
        // Each query sees the same positions of what travels.
        const auto ranges_of_part = key_ranges(queries, part, mask, seq_len);
        for (size_t i = 0; i < ranges.size(); i += 2) {
          const int64_t count = std::max(ranges[i + 1] - ranges[i], 0);
          REQUIRE(std::max(ranges_of_part[i + 1] - ranges_of_part[i], 0) == count);
          if (count == 0) continue;
          REQUIRE(part.position(ranges_of_part[i]) == block.position(ranges[i]));
          REQUIRE(part.position(ranges_of_part[i + 1] - 1) == block.position(ranges[i + 1] - 1));
        }
        // The gaps are the unseen stretches inside, but for rows at their edges.
        std::vector<RowRange> gaps;
        int64_t last_seen = -1;
        for (int64_t key = 0; key < block.size(); ++key) {
          if (!seen[key]) continue;
          if (last_seen < 0) REQUIRE(visit.keys.hull.begin == key);
          const RowRange gap = {last_seen + 1 + ringattn::kRowsAtGaps, key - ringattn::kRowsAtGaps};
          if (last_seen >= 0 && gap.size() >= ringattn::kMinGap) gaps.push_back(gap);
          last_seen = key;
        }
        REQUIRE(visit.keys.hull.end == last_seen + 1);
        if (visit.source == rank) gaps.clear();  // the own block does not travel
        REQUIRE(visit.keys.gaps == gaps);
        num_gaps += static_cast<int64_t>(gaps.size());
      }
    }
  }
  CHECK(num_gaps > 50);
}

TEST_CASE("the hull of rows ends with keys that one of them sees") {
  // Rows 0 and 3 see nothing of the keys, which are parts of three documents.
  const Mask mask = {/*causal=*/false, -1, -1, {0, 4, 8, 12, 16, 20}};
  const BlockRows queries({{3, 5}, {9, 10}, {18, 19}}), keys({{5, 8}, {10, 12}, {12, 14}});
  CHECK(key_ranges(queries, keys, mask, 20) == std::vector<int32_t>{0, 0, 0, 3, 3, 5, 7, 5});
}

TEST_CASE("pieces that leave out a position, or have one twice, are refused") {
  CHECK_THROWS_AS(Partition({{{0, 3}}, {{4, 5}}}), std::invalid_argument);
  CHECK_THROWS_AS(Partition({{{0, 3}}, {{2, 5}}}), std::invalid_argument);
  CHECK_THROWS_AS(Partition({{{3, 5}, {0, 3}}}), std::invalid_argument);
  CHECK_THROWS_AS(Partition(std::vector<std::vector<Segment>>{}), std::invalid_argument);
}

TEST_CASE("a schedule computes exactly the visible pairs") {
  std::mt19937 random(2);
  for (int trial = 0; trial < 150; ++trial) {
    const auto lengths = random_lengths(random);
    std::vector<int64_t> order;
    for (size_t rank = 0; rank < lengths.size(); ++rank) order.push_back(rank);
    std::shuffle(order.begin(), order.end(), random);
    for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
      const Partition partition(layout, lengths, order);
      for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
        check_against_brute_force(partition, rank, {/*causal=*/true});
        check_against_brute_force(partition, rank, {/*causal=*/false});
      }
    }
  }
}

TEST_CASE("blocks visit once each, the own one first, then backwards through the order") {
  const Partition partition(Layout::kZigzag, {4, 4, 4, 4}, {2, 0, 3, 1});
  const auto visits = schedule(partition, 3, {true});
  REQUIRE(visits.size() == 4);
  CHECK(visits[0].source == 3);
  CHECK(visits[1].source == 0);
  CHECK(visits[2].source == 2);
  CHECK(visits[3].source == 1);
}

TEST_CASE("blocks of ranks without tokens visit last, and each visit is a hop of both ranks") {
  const Partition partition(Layout::kZigzag, {4, 0, 4, 0, 4}, {4, 1, 0, 3, 2});
  const auto sources = [&](int64_t rank) {
    std::vector<int64_t> sources;
    for (const Visit& visit : schedule(partition, rank, {true})) sources.push_back(visit.source);
    return sources;
  };
  CHECK(sources(0) == std::vector<int64_t>{0, 4, 2, 1, 3});
  CHECK(sources(2) == std::vector<int64_t>{2, 0, 4, 1, 3});
  CHECK(sources(4) == std::vector<int64_t>{4, 2, 0, 1, 3});
  for (int64_t rank = 0; rank < 5; ++rank) {
    auto all = sources(rank);
    std::sort(all.begin(), all.end());
    CHECK(all == std::vector<int64_t>{0, 1, 2, 3, 4});
    for (int64_t step = 0; step < 5; ++step) {
      const int64_t other = ringattn::VisitOrder(partition, partition).destination_at(rank, step);
      if (partition.length(rank) == 0 || partition.length(other) == 0) continue;
      CHECK(sources(other)[step] == rank);
    }
  }
}

TEST_CASE("zigzag work between two ranks is half the product of their lengths") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    auto lengths = random_lengths(random);
    const bool even = trial % 2 == 0;
    for (int64_t& length : lengths) length = even ? length * 2 : length;
    const Partition partition(Layout::kZigzag, lengths);
    for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
      for (const Visit& visit : schedule(partition, rank, {true})) {
        if (visit.source == rank) continue;
        const int64_t twice = 2 * visit.num_pairs;
        const int64_t product = partition.length(rank) * partition.length(visit.source);
        if (even) CHECK(twice == product);
        // Odd lengths: within half a row of either side.
        CHECK(std::abs(twice - product) <=
              std::max(partition.length(rank), partition.length(visit.source)));
      }
    }
  }
}

TEST_CASE("every row is completed by exactly one call, the last that visits it") {
  std::mt19937 random(4);
  for (int trial = 0; trial < 400; ++trial) {
    const auto layout = trial % 2 == 0 ? Layout::kZigzag : Layout::kContiguous;
    const Partition partition =
        trial % 5 == 0 ? random_pieces(random) : Partition(layout, random_lengths(random));
    const Partition keys = trial % 6 < 2 ? behind_cached_rows(random, partition, 20) : partition;
    const Mask mask = trial % 4 < 2 ? Mask{trial % 3 != 0} : random_mask(random, keys.seq_len());
    for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
      const auto visits = schedule(partition, keys, rank, mask);
      std::vector<int> completed(partition.length(rank), 0);
      for (const Visit& visit : visits) {
        for (int64_t row = visit.queries.begin; row < visit.queries.end; ++row) {
          CHECK((!visit.visible() || completed.at(row) == 0));
        }
        for (int64_t row = visit.final.begin; row < visit.final.end; ++row) ++completed.at(row);
      }
      for (const int times : completed) CHECK(times == 1);
    }
  }
}
