// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/export.h"

namespace ringattn {

/// Positions [begin, end) of the sequence.
struct Segment {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const Segment& a, const Segment& b) {
    return a.begin == b.begin && a.end == b.end;
  }
};

/// Which keys of the sequence a query sees: those of one interval of positions. Neither bound of
/// the interval decreases from a position to the next. Arguments of a caller become one by
/// make_mask().
struct Mask {
  static constexpr int64_t kUnlimited = -1;

  bool causal = true;  // no key after the query's own position
  // Keys before and after the query's position that it sees, as FlashAttention counts them; causal:
  // none after it.
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;
  // Boundaries of packed documents, [0, ..., S], rising: a query sees keys of its own document.
  // Empty: the sequence is one document.
  std::vector<int64_t> cu_seqlens = {};

  /// Whether there is more than one document.
  bool has_documents() const { return cu_seqlens.size() > 2; }

  /// Whether `causal` says all.
  bool is_plain() const {
    return window_left == kUnlimited && window_right == kUnlimited && !has_documents();
  }

  /// The document of a position of a sequence of `seq_len` tokens.
  Segment document(int64_t position, int64_t seq_len) const {
    if (cu_seqlens.empty()) return {0, seq_len};
    const auto end = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), position);
    return {*(end - 1), *end};
  }

  /// What a query at `position` of this document sees.
  Segment visible(int64_t position, const Segment& document) const {
    const int64_t right = causal ? 0 : window_right;
    const int64_t first = window_left == kUnlimited ? document.begin : position - window_left;
    const int64_t end = right == kUnlimited ? document.end : position + right + 1;
    return {std::max(first, document.begin), std::min(end, document.end)};
  }
};

/// Throws std::invalid_argument unless these are the boundaries of documents in a sequence of
/// `seq_len` tokens.
RINGATTN_API void check_documents(const std::vector<int64_t>& cu_seqlens, int64_t seq_len);

/// The mask of these arguments over a sequence of `seq_len` tokens. A side of a window that reaches
/// all keys is unlimited, however long it is: no sum with a position overflows. Empty documents are
/// left out, and so is a single one. So a mask that hides nothing more than a plain one is plain.
/// Throws std::invalid_argument for sides below -1 and as check_documents().
RINGATTN_API Mask make_mask(bool causal, int64_t window_left, int64_t window_right,
                            const std::optional<std::vector<int64_t>>& cu_seqlens, int64_t seq_len);

}  // namespace ringattn
