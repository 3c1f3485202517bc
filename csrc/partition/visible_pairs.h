// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"
#include "partition/mask.h"

namespace ringattn {

/// Consecutive rows of one document: row `begin + i` sees `pairs + i * slope` keys.
struct RowRun {
  Segment document;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t pairs = 0;
  int64_t slope = 0;  // 1, 0 or -1

  int64_t pairs_at(int64_t row) const { return pairs + (row - begin) * slope; }
  RowRun part(int64_t first, int64_t last) const {
    return {document, first, last, pairs_at(first), slope};
  }
  /// Pairs of rows [first, last).
  int64_t pairs_of(int64_t first, int64_t last) const {
    return (last - first) * (pairs_at(first) + pairs_at(last - 1)) / 2;
  }
};

/// The visible pairs of a query and a key of a sequence, in closed form.
class RINGATTN_API VisiblePairs {
 public:
  /// Of a mask by make_mask(). Throws std::invalid_argument for more than kMaxTokens tokens.
  VisiblePairs(Mask mask, int64_t seq_len);

  /// The pairs of more tokens may exceed 63 bits.
  static constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;

  int64_t seq_len() const { return seq_len_; }
  /// Ascending; they cover [0, S) once.
  const std::vector<RowRun>& runs() const { return runs_; }
  /// Pairs of rows [0, position).
  int64_t before(int64_t position) const;
  /// The longest row's keys.
  int64_t longest_row() const { return longest_row_; }
  /// The keys that rows [begin, end) see, not empty: consecutive, since each row sees itself.
  Segment keys_of(int64_t begin, int64_t end) const;
  /// The same, for rows of one document.
  Segment keys_of(Segment document, int64_t begin, int64_t end) const;

 private:
  Mask mask_;
  int64_t seq_len_;
  std::vector<RowRun> runs_;
  std::vector<int64_t> before_;  // pairs of the rows before each run
  int64_t longest_row_ = 0;
};

}  // namespace ringattn
