// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "catch.h"
#include "partition/packed.h"

using ringattn::Mask;
using ringattn::packed_pieces;
using ringattn::Pieces;
using ringattn::rows_fetched;
using ringattn::Segment;
using ringattn::VisiblePairs;

namespace {

using Documents = std::vector<int64_t>;

Documents boundaries(const Documents& lengths) {
  Documents cu_seqlens{0};
  for (const int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  return cu_seqlens;
}

bool sees(const Mask& mask, int64_t query, int64_t key) {
  const auto document = [&](int64_t position) {
    return std::upper_bound(mask.cu_seqlens.begin(), mask.cu_seqlens.end(), position);
  };
  if (document(query) != document(key) || (mask.causal && key > query)) return false;
  return (mask.window_left < 0 || query - key <= mask.window_left) &&
         (mask.window_right < 0 || key - query <= mask.window_right);
}

VisiblePairs visible_pairs(const Mask& mask) { return VisiblePairs(mask, mask.cu_seqlens.back()); }

int64_t pairs_of(const VisiblePairs& pairs, const std::vector<Segment>& pieces) {
  int64_t sum = 0;
  for (const Segment& piece : pieces) sum += pairs.before(piece.end) - pairs.before(piece.begin);
  return sum;
}

int64_t tokens_of(const std::vector<Segment>& pieces) {
  int64_t sum = 0;
  for (const Segment& piece : pieces) sum += piece.end - piece.begin;
  return sum;
}

Mask random_mask(std::mt19937& random, int max_length) {
  Documents lengths(1 + random() % 12);
  for (int64_t& length : lengths) {
    const int longest = random() % 5 == 0 ? 5 * max_length : max_length;
    length = random() % 6 == 0 ? 0 : random() % (longest + 1);
  }
  const auto window = [&] { return random() % 2 == 0 ? -1 : static_cast<int64_t>(random() % 20); };
  return {random() % 2 == 0, window(), window(), boundaries(lengths)};
}

std::vector<double> random_weights(std::mt19937& random, int64_t world_size) {
  std::vector<double> weights(world_size);
  for (double& weight : weights) {
    weight = random() % 5 == 0 ? 0.0 : random() % 4 == 0 ? (random() % 1000 + 1) / 1e4 : 1.5;
  }
  weights[random() % world_size] = 1.0;
  return weights;
}

// The contract of packed_pieces, but for the rows that are fetched.
void check_pieces(const VisiblePairs& pairs, const Pieces& pieces, std::vector<double> weights) {
  const int64_t world_size = static_cast<int64_t>(pieces.size());
  const bool equal = weights.empty();
  if (equal) weights.assign(world_size, 1.0);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double longest = static_cast<double>(pairs.longest_row());
  std::vector<Segment> all;
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    int64_t end = -1;
    for (const Segment& piece : pieces[rank]) {
      CHECK(piece.begin > end);  // neighbours are joined
      CHECK(piece.end > piece.begin);
      end = piece.end;
      all.push_back(piece);
    }
    const double weight = weights[rank] / sum;
    tokens.push_back(tokens_of(pieces[rank]));
    CHECK(std::abs(tokens[rank] - weight * pairs.seq_len()) < 1 + 1e-9);
    if (weight == 0.0) CHECK(tokens[rank] == 0);
    const double share = weight * pairs.before(pairs.seq_len());
    CHECK(pairs_of(pairs, pieces[rank]) <= share + std::max(0.02 * share, longest) + 1e-6);
  }
  if (equal) {
    const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
    CHECK(*most - *least <= 1);
  }
  std::sort(all.begin(), all.end(),
            [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  int64_t covered = 0;
  for (const Segment& piece : all) {
    CHECK(piece.begin == covered);
    covered = piece.end;
  }
  CHECK(covered == pairs.seq_len());
}

constexpr int64_t kSeqLen = 131072;

enum class Lengths { kEqual, kLognormal, kOneLong, kPareto };

Documents random_documents(Lengths kind, int seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> lognormal(std::log(4096.0), 1.0);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  Documents lengths;
  int64_t left = kSeqLen;
  while (left > 0) {
    double length = 2048;
    if (kind == Lengths::kLognormal) length = lognormal(random);
    if (kind == Lengths::kOneLong) length = lengths.empty() ? kSeqLen / 2 : 3000 * uniform(random);
    if (kind == Lengths::kPareto) length = 512 * std::pow(1 - uniform(random), -1 / 0.7);
    lengths.push_back(static_cast<int64_t>(std::clamp(length, 1.0, static_cast<double>(left))));
    left -= lengths.back();
  }
  std::shuffle(lengths.begin(), lengths.end(), random);
  return boundaries(lengths);
}

// Equal chunks, those with the most pairs first, each to the least loaded rank with room.
Pieces largest_chunks_first(const VisiblePairs& pairs, int64_t world_size) {
  constexpr int64_t kChunksPerRank = 32;
  const int64_t rows = pairs.seq_len() / (kChunksPerRank * world_size);
  std::vector<Segment> chunks;
  for (int64_t row = 0; row < pairs.seq_len(); row += rows) chunks.push_back({row, row + rows});
  std::stable_sort(chunks.begin(), chunks.end(), [&](const Segment& a, const Segment& b) {
    return pairs_of(pairs, {a}) > pairs_of(pairs, {b});
  });
  Pieces pieces(world_size);
  for (const Segment& chunk : chunks) {
    std::vector<Segment>* least = nullptr;
    for (auto& owned : pieces) {
      if (owned.size() == kChunksPerRank) continue;
      if (!least || pairs_of(pairs, owned) < pairs_of(pairs, *least)) least = &owned;
    }
    least->push_back(chunk);
  }
  for (auto& owned : pieces) {
    std::sort(owned.begin(), owned.end(),
              [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  }
  return pieces;
}

int64_t most_rows_fetched(const VisiblePairs& pairs, const Pieces& pieces) {
  int64_t most = 0;
  for (const auto& owned : pieces) most = std::max(most, rows_fetched(pairs, owned));
  return most;
}

int64_t all_rows_fetched(const VisiblePairs& pairs, const Pieces& pieces) {
  int64_t sum = 0;
  for (const auto& owned : pieces) sum += rows_fetched(pairs, owned);
  return sum;
}

}  // namespace

TEST_CASE("visible pairs in closed form equal those counted one by one") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const Mask mask = random_mask(random, 12);
    const VisiblePairs pairs = visible_pairs(mask);
    int64_t count = 0, longest = 0;
    for (int64_t query = 0; query < pairs.seq_len(); ++query) {
      CHECK(pairs.before(query) == count);
      Segment keys{pairs.seq_len(), 0};
      for (int64_t key = 0; key < pairs.seq_len(); ++key) {
        if (sees(mask, query, key)) keys = {std::min(keys.begin, key), key + 1};
      }
      CHECK(pairs.keys_of(query, query + 1).begin == keys.begin);
      CHECK(pairs.keys_of(query, query + 1).end == keys.end);
      count += keys.end - keys.begin;
      longest = std::max(longest, keys.end - keys.begin);
    }
    CHECK(pairs.before(pairs.seq_len()) == count);
    CHECK(pairs.longest_row() == longest);
  }
}

TEST_CASE("rows fetched are the visible ones that a rank does not own") {
  std::mt19937 random(2);
  for (int trial = 0; trial < 200; ++trial) {
    const Mask mask = random_mask(random, 12);
    const VisiblePairs pairs = visible_pairs(mask);
    std::vector<Segment> pieces;
    std::vector<bool> owned(pairs.seq_len());
    for (int64_t row = random() % 5; row < pairs.seq_len(); row += 1 + random() % 10) {
      const int64_t end = std::min<int64_t>(pairs.seq_len(), row + 1 + random() % 10);
      pieces.push_back({row, end});
      for (; row < end; ++row) owned[row] = true;
    }
    int64_t fetched = 0;
    for (int64_t key = 0; key < pairs.seq_len(); ++key) {
      bool seen = false;
      for (int64_t query = 0; query < pairs.seq_len(); ++query) {
        seen = seen || (owned[query] && sees(mask, query, key));
      }
      fetched += seen && !owned[key];
    }
    CHECK(rows_fetched(pairs, pieces) == fetched);
  }
}

TEST_CASE("packed pieces of any documents are balanced in tokens and pairs") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 3000; ++trial) {
    const int max_length[] = {3, 10, 100, 1000};
    const VisiblePairs pairs = visible_pairs(random_mask(random, max_length[trial % 4]));
    const int64_t world_size = 1 + random() % (trial % 5 == 0 ? 40 : 9);
    std::vector<double> weights;
    if (trial % 2 == 0) weights = random_weights(random, world_size);
    check_pieces(pairs, packed_pieces(pairs, world_size, weights), weights);
  }
}

TEST_CASE("rows are dealt one by one where arcs cannot be balanced") {
  const std::vector<double> weights{0.0564, 0.0583, 3, 3, 0.0754, 0, 0, 0.0626};
  const VisiblePairs pairs = visible_pairs({false, 13, -1, {0, 6, 14, 21, 30, 38, 46, 47}});
  check_pieces(pairs, packed_pieces(pairs, 8, weights), weights);
}

TEST_CASE("packed pieces fetch fewer rows than chunks that are dealt by their pairs") {
  for (const auto kind : {Lengths::kLognormal, Lengths::kOneLong, Lengths::kPareto}) {
    for (int seed = 0; seed < 6; ++seed) {
      const VisiblePairs pairs = visible_pairs({true, -1, -1, random_documents(kind, seed)});
      for (const int64_t world_size : {2, 4, 8}) {
        const Pieces pieces = packed_pieces(pairs, world_size);
        check_pieces(pairs, pieces, {});
        const Pieces chunks = largest_chunks_first(pairs, world_size);
        INFO("documents " << static_cast<int>(kind) << ", seed " << seed << ", " << world_size
                          << " ranks");
        CHECK(all_rows_fetched(pairs, pieces) < 0.85 * all_rows_fetched(pairs, chunks));
        // Where one document is nearly everything, the rank that owns its end fetches nearly all
        // that it does not own.
        CHECK(most_rows_fetched(pairs, pieces) <= most_rows_fetched(pairs, chunks) + kSeqLen / 40);
      }
    }
  }
}

TEST_CASE("documents that fill ranks exactly stay whole") {
  const VisiblePairs pairs = visible_pairs({true, -1, -1, random_documents(Lengths::kEqual, 0)});
  for (const int64_t world_size : {2, 4, 8}) {
    const Pieces pieces = packed_pieces(pairs, world_size);
    check_pieces(pairs, pieces, {});
    CHECK(most_rows_fetched(pairs, pieces) == 0);
    for (const auto& owned : pieces) CHECK(owned.size() == 1);
  }
}

TEST_CASE("packed pieces are few") {
  const VisiblePairs pairs =
      visible_pairs({true, -1, -1, random_documents(Lengths::kLognormal, 0)});
  size_t num_pieces = 0;
  for (const auto& owned : packed_pieces(pairs, 8)) num_pieces += owned.size();
  CHECK(num_pieces <= 8 * 5);
}

TEST_CASE("a sequence without tokens gives no pieces, one rank owns everything") {
  for (const Documents& cu_seqlens : {Documents{0}, Documents{0, 0, 0}}) {
    const VisiblePairs pairs = visible_pairs({true, -1, -1, cu_seqlens});
    CHECK(packed_pieces(pairs, 3) == Pieces(3));
  }
  const VisiblePairs pairs = visible_pairs({true, -1, -1, {0, 5, 5, 9}});
  CHECK(packed_pieces(pairs, 1) == Pieces{{{0, 9}}});
  CHECK(packed_pieces(pairs, 3, {0, 2, 0}) == Pieces{{}, {{0, 9}}, {}});
}

TEST_CASE("packed pieces refuse weights and documents that mean nothing") {
  const VisiblePairs pairs = visible_pairs({true, -1, -1, {0, 5, 9}});
  CHECK_THROWS_AS(packed_pieces(pairs, 0), std::invalid_argument);
  CHECK_THROWS_AS(packed_pieces(pairs, 2, {0, 0}), std::invalid_argument);
  CHECK_THROWS_AS(packed_pieces(pairs, 2, {1}), std::invalid_argument);
  CHECK_THROWS_AS(packed_pieces(pairs, 2, {1, -1}), std::invalid_argument);
  CHECK_THROWS_AS(packed_pieces(pairs, 2, {1, std::numeric_limits<double>::infinity()}),
                  std::invalid_argument);
}
