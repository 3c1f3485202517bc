// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <random>
#include <set>

#include "catch.h"
#include "partition/schedule.h"

using ringattn::Band;
using ringattn::Layout;
using ringattn::Partition;
using ringattn::schedule;
using ringattn::Visit;

namespace {

std::vector<int64_t> positions(const Partition& partition, int64_t rank) {
  std::vector<int64_t> positions;
  for (const auto& [begin, end] : partition.segments(rank)) {
    for (int64_t position = begin; position < end; ++position) positions.push_back(position);
  }
  return positions;
}

std::vector<int64_t> random_lengths(std::mt19937& random) {
  std::vector<int64_t> lengths(1 + random() % 5);
  for (int64_t& length : lengths) length = random() % 5 == 0 ? 0 : random() % 14;
  return lengths;
}

// How many bands of a schedule hold each pair of a query row and a key row.
void check_against_brute_force(const Partition& partition, int64_t rank, bool causal) {
  const auto queries = positions(partition, rank);
  for (const Visit& visit : schedule(partition, rank, {causal})) {
    const auto keys = positions(partition, visit.source);
    int64_t num_pairs = 0, rows_used = 0;
    for (size_t i = 0; i < queries.size(); ++i) {
      for (size_t j = 0; j < keys.size(); ++j) {
        int64_t times = 0;
        for (const Band& band : visit.bands) times += band.sees(i, j) ? 1 : 0;
        const bool visible = !causal || keys[j] <= queries[i];
        REQUIRE(times == (visible ? 1 : 0));
        num_pairs += times;
        if (visible) rows_used = std::max<int64_t>(rows_used, j + 1);
      }
    }
    REQUIRE(visit.num_pairs() == num_pairs);
    REQUIRE(visit.rows_used() == rows_used);
    REQUIRE(ringattn::rows_used(partition, rank, visit.source, {causal}) == rows_used);
    for (const Band& band : visit.bands) REQUIRE(band.num_pairs() > 0);
  }
}

}  // namespace

TEST_CASE("a band counts its visible pairs") {
  std::mt19937 random(1);
  const auto limit = [&](int64_t unlimited) {
    return random() % 5 == 0 ? unlimited : static_cast<int64_t>(random() % 40) - 20;
  };
  for (int trial = 0; trial < 2000; ++trial) {
    Band band;
    band.query_begin = random() % 5;
    band.query_end = band.query_begin + random() % 15;
    band.key_begin = random() % 5;
    band.key_end = band.key_begin + random() % 15;
    band.upper = limit(Band::kUnlimited);
    band.lower = std::min(limit(-Band::kUnlimited), band.upper);
    const int64_t last_key = band.num_keys() - 1, last_query = band.num_queries() - 1;
    int64_t pairs = 0, below = 0, above = 0;
    for (int64_t i = 0; i <= last_query; ++i) {
      for (int64_t j = 0; j <= last_key; ++j) {
        pairs += band.sees(band.query_begin + i, band.key_begin + j) ? 1 : 0;
        below += j - i < band.lower ? 1 : 0;
        above += j - i > band.upper ? 1 : 0;
      }
    }
    REQUIRE(band.num_pairs() == pairs);
    if (last_key < 0 || last_query < 0) continue;
    REQUIRE(band.has_lower() == (below > 0));
    REQUIRE(band.has_upper() == (above > 0));
  }
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
        check_against_brute_force(partition, rank, true);
        check_against_brute_force(partition, rank, false);
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
      const int64_t other = partition.destination_at(rank, step);
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
        const int64_t twice = 2 * visit.num_pairs();
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
  for (int trial = 0; trial < 200; ++trial) {
    const auto layout = trial % 2 == 0 ? Layout::kZigzag : Layout::kContiguous;
    const Partition partition(layout, random_lengths(random));
    for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
      const auto visits = schedule(partition, rank, {trial % 3 != 0});
      std::vector<int> completed(partition.length(rank), 0);
      for (const Visit& visit : visits) {
        for (const Band& band : visit.bands) {
          for (int64_t row = band.query_begin; row < band.query_end; ++row)
            CHECK(completed.at(row) == 0);
        }
        for (int64_t row = visit.final_begin; row < visit.final_end; ++row) ++completed.at(row);
      }
      for (const int times : completed) CHECK(times == 1);
    }
  }
}
