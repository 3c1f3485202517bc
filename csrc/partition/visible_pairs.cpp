// SPDX-License-Identifier: Apache-2.0
#include "partition/visible_pairs.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringattn {
namespace {

// Keys of a row on one side of it, in a document of `length` tokens.
int64_t limited(int64_t side, int64_t length) {
  return side == Mask::kUnlimited ? length : std::min(side, length);
}

}  // namespace

VisiblePairs::VisiblePairs(Mask mask, int64_t seq_len) : mask_(std::move(mask)), seq_len_(seq_len) {
  if (seq_len > kMaxTokens) {
    throw std::invalid_argument(
        "a sequence with a window or documents must have fewer than 2**31 "
        "tokens, got " +
        std::to_string(seq_len));
  }
  if (mask_.cu_seqlens.empty()) mask_.cu_seqlens = {0, seq_len};
  int64_t total = 0;
  for (size_t document = 1; document < mask_.cu_seqlens.size(); ++document) {
    const Segment whole = {mask_.cu_seqlens[document - 1], mask_.cu_seqlens[document]};
    // From row `left` on, the first visible key moves with the row; from row `length - right - 1`
    // on, the last one stays at the document's end.
    const int64_t left = limited(mask_.window_left, whole.size());
    const int64_t right = mask_.causal ? 0 : limited(mask_.window_right, whole.size());
    std::array<int64_t, 4> bounds{0, left, std::max<int64_t>(0, whole.size() - right - 1),
                                  whole.size()};
    std::sort(bounds.begin(), bounds.end());
    for (size_t i = 1; i < bounds.size(); ++i) {
      const int64_t begin = whole.begin + bounds[i - 1], end = whole.begin + bounds[i];
      if (begin == end) continue;
      const int64_t pairs = mask_.visible(begin, whole).size();
      const int64_t slope = end - begin > 1 ? mask_.visible(begin + 1, whole).size() - pairs : 0;
      const RowRun& run = runs_.emplace_back(RowRun{whole, begin, end, pairs, slope});
      longest_row_ = std::max({longest_row_, pairs, run.pairs_at(run.end - 1)});
      before_.push_back(total);
      total += run.pairs_of(run.begin, run.end);
    }
  }
  before_.push_back(total);
}

int64_t VisiblePairs::before(int64_t position) const {
  const auto next = std::partition_point(runs_.begin(), runs_.end(),
                                         [&](const RowRun& run) { return run.end <= position; });
  const int64_t whole = before_[next - runs_.begin()];
  if (next == runs_.end() || position <= next->begin) return whole;
  return whole + next->pairs_of(next->begin, position);
}

Segment VisiblePairs::keys_of(Segment document, int64_t begin, int64_t end) const {
  return {mask_.visible(begin, document).begin, mask_.visible(end - 1, document).end};
}

Segment VisiblePairs::keys_of(int64_t begin, int64_t end) const {
  return {mask_.visible(begin, mask_.document(begin, seq_len_)).begin,
          mask_.visible(end - 1, mask_.document(end - 1, seq_len_)).end};
}

}  // namespace ringattn
