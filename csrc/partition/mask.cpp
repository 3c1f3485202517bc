// SPDX-License-Identifier: Apache-2.0
#include "partition/mask.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ringattn {

void check_documents(const std::vector<int64_t>& cu_seqlens, int64_t seq_len) {
  const size_t count = cu_seqlens.size();
  if (count < 2 || cu_seqlens.front() != 0) {
    throw std::invalid_argument(
        "cu_seqlens must be [0, ..., S], the boundaries of the documents, got " +
        (count == 0 ? "none"
                    : "a first one of " + std::to_string(cu_seqlens.front()) + " and " +
                          std::to_string(count) + " in all"));
  }
  if (cu_seqlens.back() != seq_len) {
    throw std::invalid_argument("cu_seqlens must end with the " + std::to_string(seq_len) +
                                " tokens of the whole sequence, got " +
                                std::to_string(cu_seqlens.back()));
  }
  const auto fall = std::is_sorted_until(cu_seqlens.begin(), cu_seqlens.end());
  if (fall != cu_seqlens.end()) {
    throw std::invalid_argument("cu_seqlens must not decrease, got " + std::to_string(*(fall - 1)) +
                                " before " + std::to_string(*fall));
  }
}

Mask make_mask(bool causal, int64_t window_left, int64_t window_right,
               const std::optional<std::vector<int64_t>>& cu_seqlens, int64_t seq_len) {
  if (window_left < Mask::kUnlimited || window_right < Mask::kUnlimited) {
    throw std::invalid_argument("window_size must be two numbers from -1 (unlimited) up, got (" +
                                std::to_string(window_left) + ", " + std::to_string(window_right) +
                                ")");
  }
  // A row has at most S - 1 keys on a side of it.
  const auto limited = [&](int64_t side) { return side < seq_len - 1 ? side : Mask::kUnlimited; };
  Mask mask;
  mask.causal = causal;
  mask.window_left = limited(window_left);
  if (!causal) mask.window_right = limited(window_right);
  if (!cu_seqlens) return mask;
  check_documents(*cu_seqlens, seq_len);
  // Empty documents hide nothing. Padding of boundaries to one length makes them.
  mask.cu_seqlens = *cu_seqlens;
  const auto end = std::unique(mask.cu_seqlens.begin(), mask.cu_seqlens.end());
  mask.cu_seqlens.erase(end, mask.cu_seqlens.end());
  if (!mask.has_documents()) mask.cu_seqlens.clear();
  return mask;
}

}  // namespace ringattn
