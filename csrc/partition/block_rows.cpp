// SPDX-License-Identifier: Apache-2.0
#include "partition/block_rows.h"

#include <algorithm>
#include <utility>

namespace ringattn {
namespace {

// The sum of first, first + 1, ... over `count` numbers.
int64_t sum_of_run(int64_t first, int64_t count) { return count * first + count * (count - 1) / 2; }

// Calls run(positions, document) for the rows of a block in ascending order, cut at the boundaries
// of documents.
template <typename Run>
void for_each_run(const BlockRows& rows, const Mask& mask, int64_t seq_len, const Run& run) {
  Segment document = {0, 0};
  for (const Segment& piece : rows.pieces()) {
    for (int64_t begin = piece.begin; begin < piece.end;) {
      if (begin >= document.end) document = mask.document(begin, seq_len);
      const int64_t end = std::min(piece.end, document.end);
      run(Segment{begin, end}, document);
      begin = end;
    }
  }
}

// The sum of keys.rows_before(clamp(i, low, high)) over i in [begin, end).
int64_t sum_clamped(const BlockRows& keys, int64_t begin, int64_t end, int64_t low, int64_t high) {
  const int64_t first = std::clamp(low, begin, end);
  const int64_t last = std::clamp(high, first, end);
  return (first - begin) * keys.rows_before(low) + keys.sum_before(last) - keys.sum_before(first) +
         (end - last) * keys.rows_before(high);
}

}  // namespace

BlockRows::BlockRows(std::vector<Segment> pieces) : pieces_(std::move(pieces)), rows_{0} {
  int64_t last_end = 0, sum = 0;
  for (const Segment& piece : pieces_) {
    const int64_t before = rows_.back();
    sum += (piece.begin - last_end) * before;
    sums_.push_back(sum);
    sum += sum_of_run(before, piece.size());
    rows_.push_back(before + piece.size());
    last_end = piece.end;
  }
}

int64_t BlockRows::rows_before(int64_t position) const {
  const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), position,
                                      [](int64_t at, const Segment& x) { return at < x.begin; });
  if (after == pieces_.begin()) return 0;
  const Segment& piece = *(after - 1);
  return rows_[after - 1 - pieces_.begin()] + std::min(position, piece.end) - piece.begin;
}

int64_t BlockRows::position(int64_t row) const {
  const auto after = std::upper_bound(rows_.begin(), rows_.end(), row) - 1;
  return pieces_[after - rows_.begin()].begin + row - *after;
}

int64_t BlockRows::sum_before(int64_t end) const {
  const auto after = std::lower_bound(pieces_.begin(), pieces_.end(), end,
                                      [](const Segment& x, int64_t at) { return x.begin < at; });
  if (after == pieces_.begin()) return 0;
  const int64_t i = after - 1 - pieces_.begin();
  const Segment& piece = pieces_[i];
  const int64_t inside = std::min(end, piece.end) - piece.begin;
  return sums_[i] + sum_of_run(rows_[i], inside) +
         std::max<int64_t>(0, end - piece.end) * rows_[i + 1];
}

int64_t BlockRows::Counter::rows_before(int64_t position) {
  const std::vector<Segment>& pieces = rows_.pieces_;
  while (piece_ < pieces.size() && pieces[piece_].end <= position) ++piece_;
  if (piece_ == pieces.size()) return rows_.size();
  return rows_.rows_[piece_] + std::max<int64_t>(0, position - pieces[piece_].begin);
}

BlockRows BlockRows::part(const RowSet& rows) const {
  std::vector<Segment> pieces;
  size_t i = 0;
  for (const RowRange& range : rows.ranges()) {
    while (i < pieces_.size() && rows_[i + 1] <= range.begin) ++i;
    for (size_t piece = i; piece < pieces_.size() && rows_[piece] < range.end; ++piece) {
      const int64_t shift = pieces_[piece].begin - rows_[piece];
      pieces.push_back({std::max(range.begin, rows_[piece]) + shift,
                        std::min(range.end, rows_[piece + 1]) + shift});
    }
  }
  return BlockRows(std::move(pieces));
}

int64_t num_pairs(const BlockRows& queries, const BlockRows& keys, const Mask& mask,
                  int64_t seq_len) {
  int64_t pairs = 0;
  for_each_run(queries, mask, seq_len, [&](const Segment& run, const Segment& document) {
    const auto& [low, high] = document;
    const auto sum_shifted = [&](int64_t shift) {
      return sum_clamped(keys, run.begin + shift, run.end + shift, low, high);
    };
    const int64_t right = mask.causal ? 0 : mask.window_right;
    pairs += right == Mask::kUnlimited ? run.size() * keys.rows_before(high)
                                       : sum_shifted(std::min(right + 1, high - low));
    pairs -= mask.window_left == Mask::kUnlimited ? run.size() * keys.rows_before(low)
                                                  : sum_shifted(-std::min(mask.window_left, high));
  });
  return pairs;
}

std::vector<Segment> visible_positions(const BlockRows& queries, const Mask& mask,
                                       int64_t seq_len) {
  std::vector<Segment> visible;
  for_each_run(queries, mask, seq_len, [&](const Segment& run, const Segment& document) {
    // The intervals of a run touch one another: they have the positions of the rows themselves.
    const int64_t begin = mask.visible(run.begin, document).begin;
    const int64_t end = mask.visible(run.end - 1, document).end;
    if (!visible.empty() && begin <= visible.back().end) {
      visible.back().end = std::max(visible.back().end, end);
    } else {
      visible.push_back({begin, end});
    }
  });
  return visible;
}

void key_ranges(const BlockRows& queries, const BlockRows& keys, const Mask& mask, int64_t seq_len,
                int32_t* ranges) {
  BlockRows::Counter before_begin(keys), before_end(keys);
  int32_t* range = ranges;
  for_each_run(queries, mask, seq_len, [&](const Segment& run, const Segment& document) {
    for (int64_t position = run.begin; position < run.end; ++position, range += 2) {
      const Segment seen = mask.visible(position, document);
      range[0] = static_cast<int32_t>(before_begin.rows_before(seen.begin));
      range[1] = static_cast<int32_t>(before_end.rows_before(seen.end));
    }
  });
  // begin == end in an empty interval so far. Its new bounds leave it empty.
  int32_t last_end = 0, next_begin = static_cast<int32_t>(keys.size());
  constexpr int32_t kEmpty = -1;
  for (int32_t* row = ranges; row != range; row += 2) {
    if (row[0] == row[1]) {
      row[0] = kEmpty;
      row[1] = last_end;
    }
    last_end = row[1];
  }
  for (int32_t* row = range; row != ranges;) {
    row -= 2;
    if (row[0] == kEmpty) row[0] = next_begin;
    next_begin = row[0];
  }
}

}  // namespace ringattn
