// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/export.h"
#include "core/hop_plan.h"
#include "partition/mask.h"

namespace ringattn {

/// The rows of a block: positions of the sequence in ascending order. Since rows are in position
/// order, any interval of positions is one interval of rows.
class RINGATTN_API BlockRows {
 public:
  /// `pieces`: ascending, apart, none empty.
  explicit BlockRows(std::vector<Segment> pieces);

  const std::vector<Segment>& pieces() const { return pieces_; }
  int64_t size() const { return rows_.back(); }
  /// Rows whose position is less than `position`, any number.
  int64_t rows_before(int64_t position) const;
  /// Of a row in [0, size()).
  int64_t position(int64_t row) const;
  /// The sum of rows_before() over the positions [0, end).
  int64_t sum_before(int64_t end) const;
  /// rows_before() for positions that never decrease, in constant time.
  class Counter {
   public:
    explicit Counter(const BlockRows& rows) : rows_(rows) {}
    int64_t rows_before(int64_t position);

   private:
    const BlockRows& rows_;
    size_t piece_ = 0;  // the first that does not end before the latest position
  };
  /// These rows as a block of their own.
  BlockRows part(const RowSet& rows) const;

 private:
  std::vector<Segment> pieces_;
  std::vector<int64_t> rows_;  // rows before each piece, then all
  std::vector<int64_t> sums_;  // sum_before() of each piece's begin
};

/// Pairs of a query row and a visible key row.
RINGATTN_API int64_t num_pairs(const BlockRows& queries, const BlockRows& keys, const Mask& mask,
                               int64_t seq_len);

/// Positions that some query row sees, ascending and apart.
RINGATTN_API std::vector<Segment> visible_positions(const BlockRows& queries, const Mask& mask,
                                                    int64_t seq_len);

/// For each query row the interval of key rows that it sees, [begin, end) one after the other, into
/// `ranges` [2 * queries.size()]. An empty interval lies between those of the rows around it: it
/// begins where the next one that is not empty does (there is none: at the last key row's end) and
/// ends where the one before ends (none: at 0), so that the hull of several rows has no key that
/// none of them sees at its ends.
RINGATTN_API void key_ranges(const BlockRows& queries, const BlockRows& keys, const Mask& mask,
                             int64_t seq_len, int32_t* ranges);

}  // namespace ringattn
