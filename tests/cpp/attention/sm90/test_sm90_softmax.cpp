// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/softcap.cuh"
#include "catch.h"
#include "device_emulator.h"

// The Hopper kernel's online softmax, the device code itself, on threads for lanes: one warp, 16
// rows, values of one column.

namespace {

using ringattn::cuda::KeyBounds;
using ringattn::cuda::KeyRange;
using ringattn::cuda::KeyTiles;
using ringattn::cuda::Softcap;
using ringattn::cuda::sm90::columns_within;
using ringattn::cuda::sm90::mask_scores;
using ringattn::cuda::sm90::OnlineSoftmax;
using ringattn::cuda::sm90::row_max;
using ringattn::cuda::sm90::RowFlags;
using ringattn::cuda::sm90::RowPair;
using ringattn::cuda::sm90::scale_accumulators;

constexpr int kRows = 16;
constexpr int kTile = 80;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Problem {
  std::array<std::vector<float>, kRows> scores;  // raw
  std::vector<float> values;
  float scale = 0.125f;
  int diagonal = 1 << 20;        // row i sees keys up to i + diagonal
  std::vector<KeyRange> ranges;  // or, if not empty, these
  float softcap = 0.0f;          // 0: none

  Problem(int num_keys, float deviation, uint32_t seed) : values(num_keys) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
    for (auto& row : scores) {
      for (int key = 0; key < num_keys; ++key) row.push_back(deviation / scale * normal(random));
    }
  }

  int num_keys() const { return static_cast<int>(values.size()); }
  int top_key(int row) const {
    return std::max_element(scores[row].begin(), scores[row].end()) - scores[row].begin();
  }
  int seen(int row) const { return std::clamp(row + diagonal + 1, 0, num_keys()); }
  KeyRange range(int row) const {
    if (ranges.empty()) return {0, seen(row)};
    return KeyBounds{num_keys(), 0, 0, nullptr}.clamped(ranges[row]);
  }
  /// Tiles that the warp walks, and those without a mask.
  KeyTiles tiles() const {
    if (ranges.empty()) return {0, (num_keys() + kTile - 1) / kTile, 0, seen(0) / kTile};
    const KeyBounds bounds = {num_keys(), 0, 0, ranges.data()};
    return KeyTiles::of(bounds.visible(0, kRows), kTile, /*keys_above=*/1);
  }
};

struct Results {
  std::array<float, kRows> out, lse;
  std::array<float, kRows> largest = {};     // probability, in any tile
  std::array<float, kRows> of_top_key = {};  // probability of the key with the largest score
  int tiles_risen = 0, tiles_overflowed = 0;
};

// As a consumer's warp does: tiles last to first, the masked ones and the first one with maxima.
Results attend(const Problem& problem) {
  Results results;
  std::atomic<int> risen{0}, overflowed{0};
  const int num_keys = problem.num_keys();
  const KeyTiles tiles = problem.tiles();
  emulator::run([&](int lane) {
    const int row = lane / 4;  // and 8 below
    const Softcap softcap(problem.scale, problem.softcap);
    const float scale_log2 = problem.softcap == 0.0f ? problem.scale * kLog2E : softcap.outer_log2;
    const auto capped = [&](float score) {
      return problem.softcap == 0.0f ? score : softcap(score);
    };
    OnlineSoftmax softmax;
    float out[4] = {};  // as accumulators of 8 columns lie: of the rows, the first column
    float scores[kTile / 2];
    const auto key_of = [&](int tile, int i) {
      return tile * kTile + 8 * (i / 4) + lane % 4 * 2 + i % 2;
    };
    const auto load = [&](int tile) {
      for (int i = 0; i < kTile / 2; ++i) {
        const int key = key_of(tile, i);
        scores[i] = capped(key < num_keys ? problem.scores[row + 8 * (i / 2 % 2)][key] : 0.0f);
      }
    };
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      load(tile);
      if (tile == tiles.end - 1 || tile >= tiles.unmasked_end || tile < tiles.unmasked_begin) {
        if (problem.ranges.empty()) {
          mask_scores(scores, row + problem.diagonal - tile * kTile, num_keys - tile * kTile);
        } else {
          const KeyBounds keys = {num_keys, 0, 0, nullptr};
          mask_scores(scores, keys, {problem.ranges[row], problem.ranges[row + 8]}, tile * kTile);
        }
        softmax.exponentiate(scores, scale_log2);
        scale_accumulators(out, softmax.decay);
      } else {
        RowPair sums = softmax.exponentiate_untested(scores, scale_log2);
        if (__any_sync(0xffffffff, softmax.has_risen(sums))) {
          if (lane == 0) ++risen;
          const RowFlags rows = OnlineSoftmax::overflowed(sums);
          if (__any_sync(0xffffffff, rows[0] || rows[1])) {
            if (lane == 0) ++overflowed;
            for (int i = 0; i < kTile / 2; ++i) {
              if (rows[i / 2 % 2])
                scores[i] = capped(problem.scores[row + 8 * (i / 2 % 2)][key_of(tile, i)]);
            }
            softmax.restart(scores, sums, rows, scale_log2);
            scale_accumulators(out, softmax.decay);
          }
          softmax.recentre(scores, sums, out, scale_log2);
        }
        softmax.add(sums);
      }
      const RowPair top = row_max(scores);
      for (int half = 0; half < 2; ++half) {
        float& largest = results.largest[row + 8 * half];
        if (lane % 4 == 0) largest = std::max(largest, top[half]);
      }
      for (int i = 0; i < kTile / 2; ++i) {
        const int at = row + 8 * (i / 2 % 2);
        if (key_of(tile, i) == problem.top_key(at)) results.of_top_key[at] = scores[i];
      }
      for (int i = 0; i < kTile / 2; ++i) {
        const int key = key_of(tile, i);
        if (key < num_keys) out[i / 2 % 2 * 2] += scores[i] * problem.values[key];
      }
    }
    for (int half = 0; half < 2; ++half) {
      float sum = out[2 * half];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const float total = softmax.row_sum(half);
      const float lse = softmax.lse(half, total, scale_log2);
      if (lane % 4 != 0) continue;
      results.out[row + 8 * half] = sum / total;
      results.lse[row + 8 * half] = lse;
    }
  });
  results.tiles_risen = risen;
  results.tiles_overflowed = overflowed;
  return results;
}

void check_row(const Problem& problem, const Results& results, int row) {
  const auto [begin, end] = problem.range(row);
  const auto score = [&](int key) {
    const double score = double{problem.scores[row][key]} * problem.scale;
    return problem.softcap == 0.0f ? score : problem.softcap * std::tanh(score / problem.softcap);
  };
  double max = -kInfinity, sum = 0.0, out = 0.0;
  for (int key = begin; key < end; ++key) max = std::max(max, score(key));
  for (int key = begin; key < end; ++key) {
    const double p = std::exp(score(key) - max);
    sum += p;
    out += p * problem.values[key];
  }
  INFO("row " << row << " of " << problem.num_keys() << " keys");
  CHECK(results.out[row] == Approx(out / sum).epsilon(1e-5).margin(1e-5));
  CHECK(results.lse[row] == Approx(max + std::log(sum)).epsilon(1e-6).margin(1e-6));
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

}  // namespace

TEST_CASE("sm90: bits of a mask are the columns between its ends") {
  const auto check = [](auto count, int begin, int end) {
    const uint32_t bits = columns_within<count>(begin, end);
    for (int i = 0; i < 32; ++i) {
      const int column = 8 * (i / 2) + i % 2;
      CAPTURE(count(), begin, end, i);
      CHECK((bits >> i & 1) == (i < count && begin <= column && column < end));
    }
  };
  for (int begin = -20; begin < 150; begin += 3) {
    for (int end = -20; end < 150; ++end) {
      check(std::integral_constant<int, 16>(), begin, end);
      check(std::integral_constant<int, 20>(), begin, end);
      check(std::integral_constant<int, 32>(), begin, end);
    }
  }
}

TEST_CASE("sm90: random scores hardly rise above the first tiles' maxima") {
  for (const int diagonal : {1 << 20, 300, 37}) {
    Problem problem(2000, 1.0f, diagonal);
    problem.diagonal = diagonal;
    const Results results = attend(problem);
    CHECK(results.tiles_risen <= 4);
    CHECK(results.tiles_overflowed == 0);
    for (int row = 0; row < kRows; ++row) check_row(problem, results, row);
  }
}

TEST_CASE("sm90: scores that rise from tile to tile are attended under new maxima") {
  for (const float powers : {2.0f, 7.0f, 12.0f, 30.0f, 900.0f}) {
    for (const bool one_row : {false, true}) {
      Problem problem(640, 1.0f, 1);
      for (int row = 0; row < kRows; ++row) {
        if (one_row && row != 5) continue;
        for (int key = 0; key < 640; ++key) {
          const int steps = (639 - key) / kTile;
          problem.scores[row][key] += steps * powers / kLog2E / problem.scale;
        }
      }
      const Results results = attend(problem);
      INFO(powers << " powers of two");
      if (powers >= 7.0f) CHECK(results.tiles_risen == 7);
      CHECK(results.tiles_overflowed == (powers == 900.0f ? 7 : 0));
      for (int row = 0; row < kRows; ++row) check_row(problem, results, row);
    }
  }
}

TEST_CASE("sm90: the probability of a key that dominates its row is 1") {
  // The dominant key is in a tile without a mask, a little or far above all others.
  for (const float above : {2.0f, 9.0f, 40.0f, 300.0f}) {
    Problem problem(800, 1.0f, 5);
    for (int row = 0; row < kRows; ++row) {
      float top = 0.0f;
      for (const float score : problem.scores[row]) top = std::max(top, score);
      problem.scores[row][37 * row % 700] = top + (row + 5) / 5.0f * above / problem.scale;
    }
    const Results results = attend(problem);
    for (int row = 0; row < kRows; ++row) {
      INFO("row " << row << ", " << above << " above");
      const double score = problem.scores[row][37 * row % 700] * problem.scale;
      // Half a unit in the last place of float16 at 1 is 2.4e-4.
      if (std::exp(score - results.lse[row]) > 0.9) {
        CHECK(results.of_top_key[row] == Approx(1.0f).epsilon(1e-4));
      }
      check_row(problem, results, row);
    }
  }
}

TEST_CASE("sm90: no probability exceeds what float16 holds") {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const Results results = attend(Problem(1500, 2.0f + 8.0f * seed, seed));
    for (const float largest : results.largest) CHECK(largest <= OnlineSoftmax::kMaxTileSum);
  }
}

TEST_CASE("sm90: a row's bits do not depend on other rows of its warp") {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const Problem problem(500, 4.0f, seed);
    Problem changed = problem;
    for (int row = 0; row < kRows; row += 3) {
      const float steepness = row % 2 == 0 ? 0.5f : 40.0f;  // rises, overflows
      for (int key = 0; key < 500; ++key) {
        changed.scores[row][key] = steepness * (500 - key) + seed;
      }
    }
    const Results before = attend(problem), after = attend(changed);
    CHECK(after.tiles_overflowed > before.tiles_overflowed);
    for (int row = 0; row < kRows; ++row) {
      if (row % 3 == 0) continue;
      INFO("row " << row << ", seed " << seed);
      CHECK(same_bits(before.out[row], after.out[row]));
      CHECK(same_bits(before.lse[row], after.lse[row]));
    }
  }
}

TEST_CASE("sm90: scores that are not finite stay where they are") {
  Problem problem(400, 1.0f, 2);
  const auto fill = [&](int row, int first, int last, float score) {
    for (int key = first; key < last; ++key) problem.scores[row][key] = score;
  };
  fill(1, 0, 400, kNaN);
  fill(2, 200, 201, kNaN);
  fill(3, 0, 400, -kInfinity);
  fill(4, 100, 400, -kInfinity);  // the first tiles that are come to
  fill(5, 0, 300, -kInfinity);
  fill(6, 10, 11, kInfinity);
  const Results results = attend(problem);
  for (const int row : {1, 2, 6})
    CHECK((std::isnan(results.out[row]) && std::isnan(results.lse[row])));
  CHECK(results.lse[3] == -kInfinity);
  for (const int row : {0, 4, 5, 7, 8, 15}) check_row(problem, results, row);
}

TEST_CASE("sm90: rows that see nothing at first, or at all") {
  Problem problem(330, 1.0f, 3);
  problem.diagonal = -4;
  const Results results = attend(problem);
  for (int row = 0; row < 4; ++row) CHECK(results.lse[row] == -kInfinity);
  for (int row = 4; row < kRows; ++row) check_row(problem, results, row);
}

TEST_CASE("sm90: a maximum that overflows when scaled leaves NaN, not nothing") {
  Problem problem(400, 0.01f, 4);
  problem.scale = 4.0f;  // the others' scores stay close together
  for (int key = 0; key < 400; ++key) problem.scores[7][key] = 1e38f;
  const Results results = attend(problem);
  CHECK(std::isnan(results.lse[7]));
  check_row(problem, results, 6);
}

TEST_CASE("sm90: rows see ranges of keys that begin and end in any tile") {
  std::mt19937 random(7);
  for (int trial = 0; trial < 40; ++trial) {
    Problem problem(700, 1.0f + trial % 3 * 6.0f, trial);
    std::vector<int> begins(kRows), ends(kRows);
    const int begin = static_cast<int>(random() % 400), width = static_cast<int>(random() % 500);
    for (int& key : begins) key = begin + static_cast<int>(random() % (1 + trial * 4));
    for (int& key : ends) key = begin + width + static_cast<int>(random() % (1 + trial * 4));
    std::sort(begins.begin(), begins.end());
    std::sort(ends.begin(), ends.end());
    for (int row = 0; row < kRows; ++row) {
      problem.ranges.push_back({std::min(begins[row], 700), std::min(ends[row], 700)});
    }
    constexpr int kLeast = std::numeric_limits<int>::min(), kMost = std::numeric_limits<int>::max();
    if (trial % 5 == 4) {
      for (int row = 0; row < 6; ++row) problem.ranges[row].begin = begins[row] = kLeast;
      for (int row = 0; row < 2; ++row) problem.ranges[row].end = ends[row] = kLeast;
      for (int row = 10; row < kRows; ++row) problem.ranges[row].end = ends[row] = kMost;
    }
    if (trial % 2 == 1) problem.softcap = trial % 4 == 1 ? 2.0f : 30.0f;
    // What no row sees may be anything.
    for (auto& scores : problem.scores) {
      std::fill(scores.begin(), scores.begin() + std::clamp(begins[0], 0, 700), kNaN);
      std::fill(scores.begin() + std::min(ends[kRows - 1], 700), scores.end(), kNaN);
    }
    const Results results = attend(problem);
    INFO("trial " << trial);
    CHECK(results.tiles_overflowed == 0);  // each row has a maximum before its unmasked tiles
    for (int row = 0; row < kRows; ++row) {
      const auto [first, last] = problem.range(row);
      if (first < last) {
        check_row(problem, results, row);
      } else {
        CHECK(results.lse[row] == -kInfinity);
      }
    }
  }
}
