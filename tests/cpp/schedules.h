// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "catch.h"
#include "partition/schedule.h"

// Schedules beside brute force, and partitions and masks to draw.

namespace ringattn::testing {

inline std::vector<int64_t> positions(const Partition& partition, int64_t rank) {
  std::vector<int64_t> positions;
  for (const auto& [begin, end] : partition.segments(rank)) {
    for (int64_t position = begin; position < end; ++position) positions.push_back(position);
  }
  return positions;
}

inline std::vector<int64_t> random_lengths(std::mt19937& random) {
  std::vector<int64_t> lengths(1 + random() % 5);
  for (int64_t& length : lengths) length = random() % 5 == 0 ? 0 : random() % 14;
  return lengths;
}

inline std::vector<int32_t> key_ranges(const BlockRows& queries, const BlockRows& keys,
                                       const Mask& mask, int64_t seq_len) {
  std::vector<int32_t> ranges(2 * queries.size());
  ringattn::key_ranges(queries, keys, mask, seq_len, ranges.data());
  return ranges;
}

inline bool inside(const RowRange& rows, int64_t row) {
  return rows.begin <= row && row < rows.end;
}

inline bool sees(const Visit& visit, const std::vector<int32_t>& ranges, int64_t i, int64_t j) {
  if (!inside(visit.queries, i) || !inside(visit.keys.hull, j)) return false;
  j -= visit.keys.hull.begin;
  switch (visit.visibility) {
    case Visibility::kAll:
      return true;
    case Visibility::kTriangle:
      return j <= i - visit.queries.begin + visit.diagonal;
    case Visibility::kSplit:
      return i >= visit.split || j < visit.early_keys;
    case Visibility::kIntervals:
      return ranges[2 * i] <= j && j < ranges[2 * i + 1];
  }
  return false;
}

// The same of the parts, as a launch of a part each attends to them.
inline bool a_part_sees(const Visit& visit, int64_t i, int64_t j) {
  j -= visit.keys.hull.begin;
  const auto parts = visit.parts();
  return std::any_of(parts.begin(), parts.end(), [&](const VisitPart& part) {
    return inside(part.queries, i) && inside(part.keys, j) &&
           (!part.diagonal ||
            j - part.keys.begin <= i - part.queries.begin + part.diagonal.value());
  });
}

// The same of all visits in one launch, in which a segment has a first query or a diagonal.
inline bool a_segment_sees(const Visit& visit, int64_t i, int64_t j) {
  j -= visit.keys.hull.begin;
  const auto parts = visit.parts();
  return std::any_of(parts.begin(), parts.end(), [&](const VisitPart& part) {
    return i >= part.queries.begin && inside(part.keys, j) &&
           (!part.diagonal ||
            j - part.keys.begin <= i - part.queries.begin + part.diagonal.value());
  });
}

inline bool is_visible(const Mask& mask, int64_t query, int64_t key) {
  if (mask.causal && key > query) return false;
  if (mask.window_left >= 0 && key < query - mask.window_left) return false;
  if (mask.window_right >= 0 && key > query + mask.window_right) return false;
  const auto& ends = mask.cu_seqlens;
  return std::none_of(ends.begin(), ends.end(), [&](int64_t end) {
    return std::min(query, key) < end && end <= std::max(query, key);
  });
}

// Every pair of a query row and a key row, and the hulls of those that see each other.
inline void check_against_brute_force(const Partition& query_side, const Partition& key_side,
                                      int64_t rank, const Mask& mask) {
  auto queries = positions(query_side, rank);
  for (int64_t& position : queries) position += key_side.seq_len() - query_side.seq_len();
  const auto hops = ringattn::plan_hops(query_side, key_side, rank, mask);
  const auto visits = schedule(query_side, key_side, rank, mask);
  REQUIRE(visits.size() == static_cast<size_t>(key_side.world_size()));
  std::set<int64_t> first_queries = {0};
  bool had_rows = false;
  for (size_t step = 0; step < visits.size(); ++step) {
    const Visit& visit = visits[step];
    const auto keys = positions(key_side, visit.source);
    std::vector<int32_t> ranges;
    const bool closed = visit.visible() && visit.visibility != Visibility::kIntervals;
    if (visit.visibility == Visibility::kIntervals) {
      const auto block = key_side.rows(visit.source).part(visit.keys);
      ranges = key_ranges(ringattn::query_rows(query_side, key_side, rank), block, mask,
                          key_side.seq_len());
      for (size_t i = 2; i < ranges.size(); ++i) REQUIRE(ranges[i - 2] <= ranges[i]);
    }
    int64_t num_pairs = 0;
    RowRange seen;
    for (int64_t i = 0; i < static_cast<int64_t>(queries.size()); ++i) {
      for (int64_t j = 0; j < static_cast<int64_t>(keys.size()); ++j) {
        const bool visible = is_visible(mask, queries[i], keys[j]);
        REQUIRE(sees(visit, ranges, i, j) == visible);
        if (closed) REQUIRE(a_part_sees(visit, i, j) == visible);
        if (closed) REQUIRE(a_segment_sees(visit, i, j) == visible);
        num_pairs += visible ? 1 : 0;
        if (visible) seen.include({j, j + 1});
      }
    }
    REQUIRE(visit.num_pairs == num_pairs);
    REQUIRE(visit.visible() == (num_pairs > 0));
    if (visit.visible()) {
      REQUIRE(visit.keys == RowSet{seen, {}});
      REQUIRE(visit.queries.end == query_side.length(rank));
      // Into what the first one leaves the others fold.
      REQUIRE((had_rows || visit.queries.begin == 0));
      had_rows = true;
    }
    for (const VisitPart& part : visit.parts()) first_queries.insert(part.queries.begin);
    if (step == 0) continue;
    // What is received is what is seen, and the owner sends as much at the same step.
    const auto& hop = hops[step - 1];
    REQUIRE(hop.source == visit.source);
    REQUIRE(hop.received.size() == seen.size());
    REQUIRE(hop.source_rows == key_side.length(hop.source));
    const auto sent = ringattn::plan_hops(query_side, key_side, hop.source, mask)[step - 1];
    if (hop.received.empty()) continue;
    REQUIRE(sent.destination == rank);
    REQUIRE(sent.sent == hop.received);
  }
  REQUIRE(first_queries.size() <= 2);                    // of all segments of a launch
  for (size_t step = 1; step < visits.size(); ++step) {  // and nothing is sent to no reader
    const auto& hop = hops[step - 1];
    if (hop.sent.empty()) continue;
    const auto reader = ringattn::plan_hops(query_side, key_side, hop.destination, mask)[step - 1];
    REQUIRE(reader.source == rank);
    REQUIRE(reader.received == hop.sent);
  }
}

inline void check_against_brute_force(const Partition& partition, int64_t rank, const Mask& mask) {
  check_against_brute_force(partition, partition, rank, mask);
}

// Joined with the last piece where it touches that.
inline void append(std::vector<Segment>& pieces, const Segment& piece) {
  if (!pieces.empty() && pieces.back().end == piece.begin) {
    pieces.back().end = piece.end;
  } else {
    pieces.push_back(piece);
  }
}

// Of exactly `seq_len` tokens over `world_size` ranks, some without any.
inline Partition random_partition(std::mt19937& random, int64_t world_size, int64_t seq_len) {
  std::vector<int64_t> owners(seq_len);
  for (int64_t& owner : owners) owner = random() % world_size;
  const auto kind = random() % 3;
  if (kind == 0) {  // runs of a few tokens
    std::vector<std::vector<Segment>> pieces(world_size);
    for (int64_t begin = 0; begin < seq_len;) {
      const int64_t end = std::min<int64_t>(seq_len, begin + 1 + random() % 6);
      append(pieces[owners[begin]], {begin, end});
      begin = end;
    }
    return Partition(std::move(pieces));
  }
  std::vector<int64_t> lengths(world_size), order;
  for (const int64_t owner : owners) lengths[random() % 4 == 0 ? 0 : owner]++;
  for (int64_t rank = 0; rank < world_size; ++rank) order.push_back(rank);
  std::shuffle(order.begin(), order.end(), random);
  return Partition(kind == 1 ? Layout::kZigzag : Layout::kContiguous, lengths, order);
}

// Pieces of random lengths for random ranks; every position is in one.
inline Partition random_pieces(std::mt19937& random) {
  std::vector<std::vector<Segment>> pieces(1 + random() % 4);
  int64_t begin = 0;
  for (int count = random() % 12; count > 0; --count) {
    const int64_t end = begin + 1 + random() % 6;
    append(pieces[random() % pieces.size()], {begin, end});
    begin = end;
  }
  return Partition(std::move(pieces));
}

// Each rank's rows of `queries` behind any rows of `before` earlier positions.
inline Partition behind_cached_rows(std::mt19937& random, const Partition& queries,
                                    int64_t before) {
  std::vector<std::vector<Segment>> pieces(queries.world_size());
  for (int64_t begin = 0; begin < before;) {
    const int64_t end = std::min<int64_t>(before, begin + 1 + random() % 8);
    append(pieces[random() % pieces.size()], {begin, end});
    begin = end;
  }
  for (int64_t rank = 0; rank < queries.world_size(); ++rank) {
    for (const auto& [begin, end] : queries.segments(rank)) {
      append(pieces[rank], {before + begin, before + end});
    }
  }
  return Partition(std::move(pieces));
}

inline Mask random_mask(std::mt19937& random, int64_t seq_len) {
  Mask mask;
  mask.causal = random() % 2 == 0;
  if (random() % 2 == 0) mask.window_left = random() % 12;
  if (random() % 2 == 0) mask.window_right = random() % 12;
  if (random() % 3 == 0) return mask;
  mask.cu_seqlens = {0, seq_len};
  for (int count = random() % 6; count > 0; --count) {
    mask.cu_seqlens.push_back(random() % (seq_len + 1));
  }
  std::sort(mask.cu_seqlens.begin(), mask.cu_seqlens.end());
  return mask;
}

}  // namespace ringattn::testing
