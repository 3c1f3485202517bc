// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "attention/cuda/sm90/scheduler/makespan.h"
#include "catch.h"

using ringattn::order_of_last_turns;
using ringattn::time_of_turns;
using ringattn::Turn;
using ringattn::with_last_in_order;

namespace {

bool is_permutation_of_all(std::vector<uint16_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

bool equal_ones_stay_in_order(const std::vector<Turn>& turns, const std::vector<uint16_t>& order) {
  const size_t first = turns.size() - order.size();
  std::map<int, int> last;  // of each length
  for (const int turn : order) {
    const auto [at, is_first] = last.emplace(turns[first + turn].length, turn);
    if (!is_first && turn < at->second) return false;
    at->second = turn;
  }
  return true;
}

/// Tiles of a rank in the middle of a zigzag ring: rows late in the sequence see most of it, rows
/// early in it little; slices of heads there and back again.
std::vector<Turn> zigzag_turns(int early_from, int late_from, int rows, int slices, int heads) {
  std::vector<Turn> turns;
  for (const int from : {late_from, early_from})
    for (int slice = 0; slice < slices; ++slice)
      for (int row = 0; row < rows; ++row) {
        const bool longest_first = (slices - 1 - slice) % 2 == 0;
        const int length = from + 1 + (longest_first ? rows - 1 - row : row);
        turns.insert(turns.end(), heads, Turn{2 * length + 3});
      }
  return turns;
}

}  // namespace

TEST_CASE("the last turns are put in order, those before them stay") {
  const std::vector<Turn> turns = {{5}, {1, 7}, {2, 8}, {3, 9}};
  const std::vector<Turn> in_order = with_last_in_order(turns, {2, 0, 1});
  std::vector<int> lengths, ends;
  for (const Turn& turn : in_order) {
    lengths.push_back(turn.length);
    ends.push_back(turn.earliest_end);
  }
  CHECK(lengths == std::vector<int>{5, 3, 1, 2});
  CHECK(ends == std::vector<int>{0, 9, 7, 8});
  CHECK(with_last_in_order(turns, {}).size() == 4);
}

TEST_CASE("turns go to whoever is free first") {
  CHECK(time_of_turns({}, 3) == 0);
  CHECK(time_of_turns({{5}}, 3) == 5);
  CHECK(time_of_turns({{5}, {4}, {3}, {2}}, 3) == 5);
  CHECK(time_of_turns({{5}, {4}, {3}, {3}, {3}}, 3) == 7);
  CHECK(time_of_turns({{1}, {2}, {3}, {4}}, 1) == 10);
}

TEST_CASE("who needs what has not come yet waits for it") {
  CHECK(time_of_turns({{1, 7}, {2}}, 1) == 9);
  CHECK(time_of_turns({{1, 7}, {2}}, 2) == 7);
  CHECK(time_of_turns({{5, 3}, {2, 6}}, 1) == 7);
}

TEST_CASE("the last turns are put in an order with which all end at about the same time") {
  // {takers, turns}: of ranks 1 to 3 of four over 8192 to 65536 tokens, and others.
  struct Case {
    std::vector<Turn> turns;
    int takers;
    double loss;  // at most
  };
  const std::vector<Case> cases = {
      {zigzag_turns(32, 80, 16, 8, 2), 66, 1.002},   // 16384, rank 2
      {zigzag_turns(48, 64, 16, 8, 2), 66, 1.002},   // rank 3
      {zigzag_turns(64, 160, 32, 8, 2), 66, 1.001},  // 32768, rank 2
      {zigzag_turns(16, 40, 8, 2, 8), 66, 1.02},     // 8192: four turns each, and not all have four
      {zigzag_turns(32, 80, 16, 8, 4), 132, 1.002},  // thread blocks alone
  };
  for (const Case& c : cases) {
    const double mean =
        std::accumulate(c.turns.begin(), c.turns.end(), 0.0,
                        [](double sum, const Turn& turn) { return sum + turn.length; }) /
        static_cast<double>(c.takers);
    const auto order = order_of_last_turns(c.turns, c.takers, 1024);
    INFO(c.turns.size() << " turns, " << time_of_turns(c.turns, c.takers) / mean);
    REQUIRE_FALSE(order.empty());
    CHECK(is_permutation_of_all(order));
    CHECK(equal_ones_stay_in_order(c.turns, order));
    CHECK(time_of_turns(with_last_in_order(c.turns, order), c.takers) <= c.loss * mean);
  }
}

TEST_CASE("any turns: an order of all the last ones that is faster, or none") {
  std::mt19937 random(3);
  int found = 0;
  for (int repeat = 0; repeat < 300; ++repeat) {
    const int takers = 1 + static_cast<int>(random() % 40);
    std::vector<Turn> turns(random() % 300);
    for (Turn& turn : turns) {
      turn = {static_cast<int>(random() % 60)};
      if (repeat % 2 == 1) turn.earliest_end = static_cast<int>(random() % 200);
    }
    const int most = static_cast<int>(random() % 128);
    const auto order = order_of_last_turns(turns, takers, most);
    CHECK(order.size() <= std::min<size_t>(most, turns.size()));
    CHECK(is_permutation_of_all(order));
    if (order.empty()) continue;
    ++found;
    CHECK(time_of_turns(with_last_in_order(turns, order), takers) < time_of_turns(turns, takers));
  }
  CHECK(found > 50);
}

TEST_CASE("of the last turns, as many are moved as end first") {
  // One taker gains nothing by any order.
  CHECK(order_of_last_turns({{4}, {8}, {8}, {8, 30}}, 1, 4).empty());
  CHECK(order_of_last_turns({{0}, {0}, {0}}, 2, 3).empty());
  struct Case {
    std::vector<Turn> turns;
    int most;
    int64_t before, after;
    std::vector<uint16_t> order;
  };
  // By two takers.
  const std::vector<Case> cases = {
      // All four, although two would gain something too.
      {{{2}, {1}, {2}, {2}, {2}, {9}}, 4, 13, 11, {0, 3, 1, 2}},
      // Of four, the second and the third would wait in front for what they need. Two have to.
      {{{5}, {7}, {1}, {9, 15}, {4, 16}, {9}}, 4, 24, 19, {1, 0}},
      // Of six, or four, one would wait. Two.
      {{{2}, {6}, {4}, {4}, {9}, {5, 16}, {7}, {9}}, 6, 25, 24, {1, 0}},
      // Of the equal ones, the first.
      {{{2}, {7}, {4}, {4, 9}, {7}}, 3, 14, 13, {0, 2, 1}},
      // None: the last one ends as late wherever it is.
      {{{2}, {2}, {3}, {3}, {3}, {9, 20}}, 4, 20, 20, {}},
  };
  for (const Case& c : cases) {
    INFO(c.turns.size() << " turns, at the most " << c.most);
    CHECK(time_of_turns(c.turns, 2) == c.before);
    const std::vector<uint16_t> order = order_of_last_turns(c.turns, 2, c.most);
    CHECK(order == c.order);
    CHECK(time_of_turns(with_last_in_order(c.turns, order), 2) == c.after);
  }
}
