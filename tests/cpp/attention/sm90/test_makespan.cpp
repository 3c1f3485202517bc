// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "attention/cuda/sm90/scheduler/makespan.h"
#include "catch.h"

using ringattn::longest_first_tail;
using ringattn::makespan;
using ringattn::rebalance_tail;
using ringattn::with_tail_order;
using ringattn::WorkTile;

namespace {

bool is_permutation_of_all(std::vector<uint16_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

bool equal_ones_stay_in_order(const std::vector<WorkTile>& tiles,
                              const std::vector<uint16_t>& order) {
  const size_t first = tiles.size() - order.size();
  std::map<int, int> last;  // of each duration
  for (const int tile : order) {
    const auto [at, is_first] = last.emplace(tiles[first + tile].duration, tile);
    if (!is_first && tile < at->second) return false;
    at->second = tile;
  }
  return true;
}

/// Work tiles of a rank in the middle of a zigzag ring: late rows see most of the sequence, early
/// ones little; groups of heads in alternating order.
std::vector<WorkTile> zigzag_tiles(int early_from, int late_from, int rows, int groups, int heads) {
  std::vector<WorkTile> tiles;
  for (const int from : {late_from, early_from})
    for (int group = 0; group < groups; ++group)
      for (int row = 0; row < rows; ++row) {
        const bool longest_first = (groups - 1 - group) % 2 == 0;
        const int length = from + 1 + (longest_first ? rows - 1 - row : row);
        tiles.insert(tiles.end(), heads, WorkTile{2 * length + 3});
      }
  return tiles;
}

}  // namespace

TEST_CASE("with_tail_order reorders the last tiles, and leaves those before them") {
  const std::vector<WorkTile> tiles = {{5}, {1, 7}, {2, 8}, {3, 9}};
  const std::vector<WorkTile> in_order = with_tail_order(tiles, {2, 0, 1});
  std::vector<int> lengths, ends;
  for (const WorkTile& tile : in_order) {
    lengths.push_back(tile.duration);
    ends.push_back(tile.earliest_end);
  }
  CHECK(lengths == std::vector<int>{5, 3, 1, 2});
  CHECK(ends == std::vector<int>{0, 9, 7, 8});
  CHECK(with_tail_order(tiles, {}).size() == 4);
}

TEST_CASE("a tile goes to the worker that is free first") {
  CHECK(makespan({}, 3) == 0);
  CHECK(makespan({{5}}, 3) == 5);
  CHECK(makespan({{5}, {4}, {3}, {2}}, 3) == 5);
  CHECK(makespan({{5}, {4}, {3}, {3}, {3}}, 3) == 7);
  CHECK(makespan({{1}, {2}, {3}, {4}}, 1) == 10);
}

TEST_CASE("a tile whose keys arrive late ends late") {
  CHECK(makespan({{1, 7}, {2}}, 1) == 9);
  CHECK(makespan({{1, 7}, {2}}, 2) == 7);
  CHECK(makespan({{5, 3}, {2, 6}}, 1) == 7);
}

TEST_CASE("rebalance_tail finds an order with which all workers end at about the same time") {
  // Ranks 1 to 3 of four over 8192 to 65536 tokens, and others.
  struct Case {
    std::vector<WorkTile> tiles;
    int workers;
    double loss;  // at most
  };
  const std::vector<Case> cases = {
      {zigzag_tiles(32, 80, 16, 8, 2), 66, 1.002},   // 16384, rank 2
      {zigzag_tiles(48, 64, 16, 8, 2), 66, 1.002},   // rank 3
      {zigzag_tiles(64, 160, 32, 8, 2), 66, 1.001},  // 32768, rank 2
      {zigzag_tiles(16, 40, 8, 2, 8), 66,
       1.02},  // 8192: four tiles for each worker, but not for all
      {zigzag_tiles(32, 80, 16, 8, 4), 132, 1.002},  // unpaired thread blocks
  };
  for (const Case& c : cases) {
    const double mean =
        std::accumulate(c.tiles.begin(), c.tiles.end(), 0.0,
                        [](double sum, const WorkTile& tile) { return sum + tile.duration; }) /
        static_cast<double>(c.workers);
    const auto order = rebalance_tail(c.tiles, c.workers, 1024);
    INFO(c.tiles.size() << " tiles, " << makespan(c.tiles, c.workers) / mean);
    REQUIRE_FALSE(order.empty());
    CHECK(is_permutation_of_all(order));
    CHECK(equal_ones_stay_in_order(c.tiles, order));
    CHECK(makespan(with_tail_order(c.tiles, order), c.workers) <= c.loss * mean);
  }
}

TEST_CASE("rebalance_tail finds a faster order of the whole tail, or none") {
  std::mt19937 random(3);
  int found = 0;
  for (int repeat = 0; repeat < 300; ++repeat) {
    const int workers = 1 + static_cast<int>(random() % 40);
    std::vector<WorkTile> tiles(random() % 300);
    for (WorkTile& tile : tiles) {
      tile = {static_cast<int>(random() % 60)};
      if (repeat % 2 == 1) tile.earliest_end = static_cast<int>(random() % 200);
    }
    const int max_tail = static_cast<int>(random() % 128);
    const auto order = rebalance_tail(tiles, workers, max_tail);
    CHECK(order.size() <= std::min<size_t>(max_tail, tiles.size()));
    CHECK(is_permutation_of_all(order));
    if (order.empty()) continue;
    ++found;
    CHECK(makespan(with_tail_order(tiles, order), workers) < makespan(tiles, workers));
  }
  CHECK(found > 50);
}

TEST_CASE("rebalance_tail reorders the number of tiles whose makespan is smallest") {
  // One worker gains nothing by any order.
  CHECK(rebalance_tail({{4}, {8}, {8}, {8, 30}}, 1, 4).empty());
  CHECK(rebalance_tail({{0}, {0}, {0}}, 2, 3).empty());
  struct Case {
    std::vector<WorkTile> tiles;
    int max_tail;
    int64_t before, after;
    std::vector<uint16_t> order;
  };
  // With two workers.
  const std::vector<Case> cases = {
      // All four are reordered, although two would gain something too.
      {{{2}, {1}, {2}, {2}, {2}, {9}}, 4, 13, 11, {0, 3, 1, 2}},
      // Of four, the second and the third would wait for their keys at the front: two are
      // reordered.
      {{{5}, {7}, {1}, {9, 15}, {4, 16}, {9}}, 4, 24, 19, {1, 0}},
      // Of six, or four, one would wait: two are reordered.
      {{{2}, {6}, {4}, {4}, {9}, {5, 16}, {7}, {9}}, 6, 25, 24, {1, 0}},
      // Of equal tiles, the first goes first.
      {{{2}, {7}, {4}, {4, 9}, {7}}, 3, 14, 13, {0, 2, 1}},
      // None: the last tile ends as late in any place.
      {{{2}, {2}, {3}, {3}, {3}, {9, 20}}, 4, 20, 20, {}},
  };
  for (const Case& c : cases) {
    INFO(c.tiles.size() << " tiles, at the most " << c.max_tail);
    CHECK(makespan(c.tiles, 2) == c.before);
    const std::vector<uint16_t> order = rebalance_tail(c.tiles, 2, c.max_tail);
    CHECK(order == c.order);
    CHECK(makespan(with_tail_order(c.tiles, order), 2) == c.after);
  }
}

TEST_CASE("longest_first_tail puts the longest of the last tiles first, unless that ends later") {
  const std::vector<WorkTile> tiles = {{1}, {2}, {9}, {2}, {5}, {9}};
  CHECK(longest_first_tail(tiles, 2, 4) == std::vector<uint16_t>{0, 3, 2, 1});
  CHECK(longest_first_tail(tiles, 2, 100).size() == 6);
  CHECK(longest_first_tail(tiles, 2, 0).empty());
  CHECK(longest_first_tail({}, 2, 4).empty());
  // The long tile's keys arrive late: others come first.
  CHECK(longest_first_tail({{1}, {1}, {4, 9}}, 1, 3).empty());
}

TEST_CASE("longest_first_tail ends evenly where durations are a fifth off") {
  std::mt19937 random(4);
  // Rows of documents, 528 of 4096 work tiles for each of 66 clusters.
  std::vector<WorkTile> tiles, real;
  for (int tile = 0; tile < 4096;) {
    const int rows = 1 + static_cast<int>(random() % 120);
    for (int row = 0; row < rows && tile < 4096; ++row, ++tile) {
      tiles.push_back({2 * row + 3});
      real.push_back({(2 * row + 3) * static_cast<int>(90 + random() % 21)});
    }
  }
  const auto order = longest_first_tail(tiles, 66, 528);
  const double mean =
      std::accumulate(real.begin(), real.end(), 0.0,
                      [](double sum, const WorkTile& tile) { return sum + tile.duration; }) /
      66;
  CHECK(is_permutation_of_all(order));
  CHECK(equal_ones_stay_in_order(tiles, order));
  CHECK(makespan(with_tail_order(real, order), 66) <= 1.005 * mean);
}
