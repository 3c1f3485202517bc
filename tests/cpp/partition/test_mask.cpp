// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "catch.h"
#include "partition/mask.h"
#include "partition/visible_pairs.h"

using ringattn::make_mask;
using ringattn::Mask;
using ringattn::Segment;
using ringattn::VisiblePairs;

namespace {

using Documents = std::vector<int64_t>;

constexpr int64_t kLongest = std::numeric_limits<int64_t>::max();
constexpr int64_t kSeqLen = 12;

}  // namespace

TEST_CASE("a window that reaches all keys is none, however long it is") {
  for (const bool causal : {false, true}) {
    for (const auto& documents : {std::optional<Documents>(), {Documents{0, 5, 5, kSeqLen}}}) {
      const Mask unlimited = make_mask(causal, -1, -1, documents, kSeqLen);
      for (const int64_t side : {kSeqLen - 1, kSeqLen, int64_t{1} << 62, kLongest}) {
        for (const auto& [left, right] : {std::pair{side, side}, {side, int64_t{-1}}}) {
          const Mask mask = make_mask(causal, left, right, documents, kSeqLen);
          CHECK(mask.is_plain() == !documents.has_value());
          for (int64_t position = 0; position < kSeqLen; ++position) {
            const Segment document = mask.document(position, kSeqLen);
            CHECK(mask.visible(position, document) == unlimited.visible(position, document));
          }
        }
      }
    }
  }
}

TEST_CASE("a window that hides a key stays as it is") {
  const Mask mask = make_mask(false, kSeqLen - 2, 3, {}, kSeqLen);
  CHECK(mask.visible(kSeqLen - 1, {0, kSeqLen}) == Segment{1, kSeqLen});
  CHECK(mask.visible(2, {0, kSeqLen}) == Segment{0, 6});
  CHECK_FALSE(make_mask(true, kSeqLen - 2, -1, {}, kSeqLen).is_plain());
}

TEST_CASE("a causal mask sees no key after the query, whatever the window says") {
  CHECK(make_mask(true, -1, 5, {}, kSeqLen).is_plain());
  CHECK(make_mask(true, 3, 5, {}, kSeqLen).visible(4, {0, kSeqLen}) == Segment{1, 5});
}

TEST_CASE("one document is no mask") {
  CHECK(make_mask(true, -1, -1, Documents{0, kSeqLen}, kSeqLen).cu_seqlens.empty());
  CHECK(make_mask(true, -1, -1, Documents{0, 0}, 0).cu_seqlens.empty());
  CHECK(make_mask(true, -1, -1, Documents{0, 0, kSeqLen, kSeqLen}, kSeqLen).is_plain());
  CHECK(make_mask(true, -1, -1, Documents{0, 0, 0}, 0).is_plain());
  CHECK(make_mask(true, -1, -1, Documents{0, 0, 3, 3, kSeqLen, kSeqLen}, kSeqLen).cu_seqlens ==
        Documents{0, 3, kSeqLen});
}

TEST_CASE("windows and boundaries that break a rule are refused") {
  for (const auto& documents : {Documents{}, {0}, {1, 12}, {0, 11}, {0, 5, 4, 12}, {0, 13, 12}}) {
    CHECK_THROWS_AS(make_mask(true, -1, -1, documents, kSeqLen), std::invalid_argument);
  }
  CHECK_THROWS_AS(make_mask(true, -2, -1, {}, kSeqLen), std::invalid_argument);
  CHECK_THROWS_AS(make_mask(true, -1, -2, {}, kSeqLen), std::invalid_argument);
}

TEST_CASE("pairs are counted for sequences whose number of pairs fits into 63 bits") {
  CHECK(VisiblePairs({.causal = false}, VisiblePairs::kMaxTokens).before(2) ==
        2 * VisiblePairs::kMaxTokens);
  CHECK_THROWS_AS(VisiblePairs({}, VisiblePairs::kMaxTokens + 1), std::invalid_argument);
}
