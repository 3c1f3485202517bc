// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <climits>
#include <cstdint>
#include <random>
#include <vector>

#include "attention/cuda/key_bounds.h"
#include "catch.h"

// Which keys query rows see, beside a look at every pair of a row and a key.

namespace {

using ringattn::KeySegment;
using ringattn::cuda::KeyBounds;
using ringattn::cuda::KeyRange;
using ringattn::cuda::KeyTiles;
using ringattn::cuda::VisibleKeys;

/// Two columns that do not decrease, some of whose entries lie outside [0, num_keys].
std::vector<int32_t> random_table(std::mt19937& random, int num_queries, int num_keys) {
  std::vector<int32_t> begins(num_queries), ends(num_queries), table;
  const int steps = 1 + static_cast<int>(random() % 6);  // several rows have one range
  const auto key = [&] { return static_cast<int>(random() % (num_keys + 7)) / steps * steps - 3; };
  std::generate(begins.begin(), begins.end(), key);
  std::generate(ends.begin(), ends.end(), key);
  std::sort(begins.begin(), begins.end());
  std::sort(ends.begin(), ends.end());
  for (int row = 0; row < num_queries; ++row) {
    table.push_back(begins[row]);
    table.push_back(ends[row]);
  }
  return table;
}

struct Segment {
  KeySegment keys;
  std::vector<int32_t> table;

  bool sees(int row, int key) const {
    if (table.empty()) return row >= keys.first_query && key - row <= keys.diagonal;
    return key >= table[2 * row] && key < table[2 * row + 1];
  }
};

Segment random_segment(std::mt19937& random, int num_queries) {
  Segment segment;
  segment.keys.num_keys = static_cast<int>(random() % 40);
  if (random() % 3 == 0) {
    segment.keys.diagonal =
        static_cast<int>(random() % (num_queries + segment.keys.num_keys + 1)) - num_queries;
    segment.keys.first_query = static_cast<int>(random() % (num_queries + 1));
  } else {
    segment.table = random_table(random, num_queries, segment.keys.num_keys);
    segment.keys.key_ranges = segment.table.data();
  }
  return segment;
}

}  // namespace

TEST_CASE("the first and the last of adjacent rows say which keys some and all of them see") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 3000; ++trial) {
    const int num_queries = 1 + static_cast<int>(random() % 30);
    const Segment segment = random_segment(random, num_queries);
    const KeyBounds bounds = KeyBounds::of(segment.keys);
    const int first = static_cast<int>(random() % num_queries);
    const int end = first + 1 + static_cast<int>(random() % (num_queries - first));
    const VisibleKeys visible = bounds.visible(first, end);
    INFO("trial " << trial << ", rows " << first << " to " << end);
    for (int key = 0; key < segment.keys.num_keys; ++key) {
      bool some = false, all = true;
      for (int row = first; row < end; ++row) {
        const auto range = bounds.range(row);
        REQUIRE(segment.sees(row, key) == (key >= range.begin && key < range.end));
        some |= segment.sees(row, key);
        all &= segment.sees(row, key);
      }
      REQUIRE((!some || (key >= visible.some.begin && key < visible.some.end)));
      REQUIRE(all == (key >= visible.all.begin && key < visible.all.end));
    }
    // Without empty rows the hull ends where some row sees a key.
    const auto empty = [&](int row) { return bounds.range(row).begin >= bounds.range(row).end; };
    if (!empty(first)) CHECK(segment.sees(first, visible.some.begin));
    if (!empty(end - 1)) CHECK(segment.sees(end - 1, visible.some.end - 1));
    CHECK(visible.some.begin >= 0);
    CHECK(visible.some.end <= segment.keys.num_keys);
  }
}

TEST_CASE("tiles of keys hold all keys that rows see, unmasked ones no other") {
  std::mt19937 random(4);
  for (int trial = 0; trial < 3000; ++trial) {
    const int num_queries = 1 + static_cast<int>(random() % 30);
    const Segment segment = random_segment(random, num_queries);
    const int block_k = 1 + static_cast<int>(random() % 9), above = static_cast<int>(random() % 2);
    const int first = static_cast<int>(random() % num_queries);
    const int end = first + 1 + static_cast<int>(random() % (num_queries - first));
    const VisibleKeys visible = KeyBounds::of(segment.keys).visible(first, end);
    const KeyTiles tiles = KeyTiles::of(visible, block_k, above);
    INFO("trial " << trial << ", rows " << first << " to " << end << ", tiles of " << block_k);
    REQUIRE(tiles.begin <= tiles.unmasked_begin);
    REQUIRE(tiles.unmasked_begin <= tiles.unmasked_end);
    REQUIRE(tiles.unmasked_end <= tiles.end);
    REQUIRE(tiles.empty() == (visible.some.begin >= visible.some.end));
    for (int tile = 0; tile * block_k < segment.keys.num_keys + block_k; ++tile) {
      bool some = false, all = true;
      for (int key = tile * block_k; key < (tile + 1) * block_k; ++key) {
        for (int row = first; row < end; ++row) {
          const bool sees = key < segment.keys.num_keys && segment.sees(row, key);
          some |= sees;
          all &= sees;
        }
      }
      const bool walked = tile >= tiles.begin && tile < tiles.end;
      const bool unmasked = tile >= tiles.unmasked_begin && tile < tiles.unmasked_end;
      REQUIRE((!some || walked));
      if (above == 0) REQUIRE(unmasked == all);
      REQUIRE((!unmasked || all));
      // What `above` is for: each row sees a key of a higher tile.
      if (!unmasked || above == 0) continue;
      for (int row = first; row < end; ++row) REQUIRE(segment.sees(row, (tile + 1) * block_k));
    }
  }
}

TEST_CASE("of tiles below the last only those in gaps are asked for again") {
  std::mt19937 random(6);
  for (int trial = 0; trial < 3000; ++trial) {
    const int num_queries = 1 + static_cast<int>(random() % 30);
    const Segment segment = random_segment(random, num_queries);
    const KeyBounds bounds = KeyBounds::of(segment.keys);
    const int first = static_cast<int>(random() % num_queries);
    const int end = first + 1 + static_cast<int>(random() % (num_queries - first));
    const int block_k = 1 + static_cast<int>(random() % 6);
    int seen_from = INT_MAX;  // as consume_intervals has it
    for (int tile = segment.keys.num_keys / block_k; tile >= 0; --tile) {
      const int first_key = tile * block_k, keys_end = first_key + block_k;
      bool sees = false;
      int first_seen = INT_MAX;
      for (int row = first; row < end; ++row) {
        const KeyRange seen = bounds.range(row);
        const bool meets = seen.meets(first_key, keys_end);
        bool one = false;
        for (int key = first_key; key < std::min(keys_end, segment.keys.num_keys); ++key) {
          one |= segment.sees(row, key);
        }
        REQUIRE(meets == one);
        sees |= one;
        if (meets) first_seen = std::min(first_seen, seen.begin);
      }
      if (tile < seen_from) seen_from = first_seen / block_k;
      REQUIRE((tile >= seen_from) == sees);
    }
  }
}

TEST_CASE("a table that decreases gives tiles of the segment") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 1000; ++trial) {
    constexpr int kRows = 8, kKeys = 20, kBlock = 3;
    KeySegment keys;
    keys.num_keys = kKeys;
    std::vector<int32_t> table(2 * kRows);
    for (int32_t& entry : table) entry = static_cast<int32_t>(random());
    keys.key_ranges = table.data();
    const KeyTiles tiles = KeyTiles::of(KeyBounds::of(keys).visible(1, kRows), kBlock, 1);
    REQUIRE((tiles.begin >= 0 && tiles.begin <= tiles.unmasked_begin));
    REQUIRE(tiles.unmasked_begin <= tiles.unmasked_end);
    REQUIRE((tiles.unmasked_end <= tiles.end && tiles.end <= (kKeys + kBlock - 1) / kBlock));
  }
}
