// SPDX-License-Identifier: Apache-2.0
#include "partition/visible_pairs.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringattn {
namespace {

// Keys of a row before (after) itself, in a document of `length` tokens.
int64_t limited(int64_t window, int64_t length) {
  return window < 0 ? length : std::min(window, length);
}

void check(const std::vector<int64_t>& cu_seqlens) {
  if (cu_seqlens.empty() || cu_seqlens.front() != 0) {
    throw std::invalid_argument("cu_seqlens must begin with 0, got " +
                                (cu_seqlens.empty() ? "none" : std::to_string(cu_seqlens.front())));
  }
  const auto fall = std::is_sorted_until(cu_seqlens.begin(), cu_seqlens.end());
  if (fall != cu_seqlens.end()) {
    throw std::invalid_argument("cu_seqlens must not decrease, got " + std::to_string(*fall) +
                                " after " + std::to_string(*(fall - 1)));
  }
  if (cu_seqlens.back() > VisiblePairs::kMaxTokens) {
    throw std::invalid_argument("cu_seqlens must end before 2**31, got " +
                                std::to_string(cu_seqlens.back()));
  }
}

}  // namespace

VisiblePairs::VisiblePairs(Mask mask) : mask_(std::move(mask)) {
  check(mask_.cu_seqlens);
  if (mask_.causal) mask_.window_right = 0;
  if (mask_.window_right > seq_len()) mask_.window_right = -1;  // so that no sum overflows
  int64_t total = 0;
  for (size_t document = 1; document < mask_.cu_seqlens.size(); ++document) {
    const int64_t first = mask_.cu_seqlens[document - 1];
    const int64_t length = mask_.cu_seqlens[document] - first;
    const int64_t left = limited(mask_.window_left, length);
    const int64_t right = limited(mask_.window_right, length);
    // From row `left` on, the first visible key moves with the row; from row `length - right - 1`
    // on, the last one stays at the document's end.
    std::array<int64_t, 4> bounds{0, left, std::max<int64_t>(0, length - right - 1), length};
    std::sort(bounds.begin(), bounds.end());
    for (size_t i = 1; i < bounds.size(); ++i) {
      const int64_t begin = bounds[i - 1], end = bounds[i];
      if (begin == end) continue;
      const int64_t slope = (begin < length - right - 1 ? 1 : 0) - (begin < left ? 0 : 1);
      const int64_t pairs =
          std::min(length, begin + right + 1) - std::max<int64_t>(0, begin - left);
      const RowRun& run = runs_.emplace_back(
          RowRun{{first, first + length}, first + begin, first + end, pairs, slope});
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

Segment VisiblePairs::document_of(int64_t row) const {
  const auto end = std::upper_bound(mask_.cu_seqlens.begin(), mask_.cu_seqlens.end(), row);
  return {*(end - 1), *end};
}

Segment VisiblePairs::keys_of(Segment document, int64_t begin, int64_t end) const {
  const int64_t left = mask_.window_left, right = mask_.window_right;
  return {left < 0 ? document.begin : std::max(document.begin, begin - left),
          right < 0 ? document.end : std::min(document.end, end + right)};
}

Segment VisiblePairs::keys_of(int64_t begin, int64_t end) const {
  return {keys_of(document_of(begin), begin, begin + 1).begin,
          keys_of(document_of(end - 1), end - 1, end).end};
}

}  // namespace ringattn
