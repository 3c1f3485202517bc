// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

#include "catch.h"
#include "planner/planner.h"
#include "planning.h"

using ringattn::Layout;
using ringattn::make_mask;
using ringattn::Mask;
using ringattn::ModelCost;
using ringattn::Partition;
using ringattn::Plan;
using ringattn::plan;
using ringattn::predict;
using ringattn::RankProfile;
using ringattn::Segment;
using ringattn::Workload;
using ringattn::testing::kLayer;
using ringattn::testing::kLayouts;
using ringattn::testing::least_ms;
using ringattn::testing::Lengths;
using ringattn::testing::slowest;
using ringattn::testing::with_speeds;

namespace {

Mask documents(int64_t seq_len, const std::vector<int64_t>& cu_seqlens) {
  return make_mask(true, -1, -1, cu_seqlens, seq_len);
}

Mask window(int64_t seq_len, int64_t left) { return make_mask(true, left, 0, {}, seq_len); }

// Documents of up to `longest` tokens.
std::vector<int64_t> random_documents(std::mt19937& random, int64_t seq_len, int64_t longest) {
  std::vector<int64_t> ends{0};
  while (ends.back() < seq_len) {
    const int64_t length = 1 + static_cast<int64_t>(random() % longest);
    ends.push_back(std::min(seq_len, ends.back() + length));
  }
  return ends;
}

Mask random_mask(std::mt19937& random, int64_t seq_len) {
  const auto side = [&] { return random() % 2 ? -1 : static_cast<int64_t>(random() % 9); };
  const bool packed = random() % 2 == 0;
  const bool causal = random() % 4 != 0;
  if (!packed) return make_mask(causal, 1 + random() % 8, side(), {}, seq_len);
  return make_mask(causal, side(), side(), random_documents(random, seq_len, 12), seq_len);
}

// The keys that each row sees, one pair after the other: nothing is shared with the planner.
std::vector<int64_t> keys_of_rows(int64_t seq_len, const Mask& mask) {
  std::vector<int64_t> keys(seq_len);
  for (int64_t query = 0; query < seq_len; ++query) {
    for (int64_t key = 0; key < seq_len; ++key) {
      const bool apart = std::any_of(
          mask.cu_seqlens.begin(), mask.cu_seqlens.end(),
          [&](int64_t end) { return std::min(query, key) < end && end <= std::max(query, key); });
      const bool early = mask.window_left >= 0 && key < query - mask.window_left;
      const bool late = (mask.causal && key > query) ||
                        (mask.window_right >= 0 && key > query + mask.window_right);
      keys[query] += !apart && !early && !late;
    }
  }
  return keys;
}

std::vector<double> reference_ms(const Partition& partition, const std::vector<int64_t>& keys,
                                 const std::vector<RankProfile>& profiles, const ModelCost& cost) {
  std::vector<double> ms(profiles.size());
  for (size_t rank = 0; rank < profiles.size(); ++rank) {
    if (partition.length(rank) == 0) continue;
    int64_t pairs = 0;
    for (const Segment& piece : partition.segments(rank)) {
      pairs = std::accumulate(keys.begin() + piece.begin, keys.begin() + piece.end, pairs);
    }
    const double tokens = static_cast<double>(partition.length(rank));
    const RankProfile& profile = profiles[rank];
    ms[rank] = profile.overhead_ms + tokens * cost.linear_flops / profile.linear_tflops / 1e9 +
               static_cast<double>(pairs) * cost.attention_flops / profile.attention_tflops / 1e9;
  }
  return ms;
}

double mean(const std::vector<double>& ms) {
  return std::accumulate(ms.begin(), ms.end(), 0.0) / static_cast<double>(ms.size());
}

}  // namespace

TEST_CASE("under any mask a plan is the fastest partition, and its times are those of its pairs") {
  std::mt19937 random(1);
  const ModelCost cost{1e9, 3e9, 16};
  std::uniform_real_distribution<double> speed(0.2, 1.0);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t seq_len = 8 + random() % 17;
    std::vector<RankProfile> profiles(2 + random() % 2);
    for (RankProfile& profile : profiles) {
      profile.attention_tflops = speed(random);
      profile.linear_tflops = speed(random);
      if (random() % 3 == 0) profile.overhead_ms = 4 * speed(random);
    }
    if (random() % 2) profiles[0].max_tokens = random() % (seq_len + 1);
    const Mask mask = random_mask(random, seq_len);
    if (mask.is_plain()) continue;
    const auto keys = keys_of_rows(seq_len, mask);
    for (const Layout layout : kLayouts) {
      const Plan planned = plan(seq_len, profiles, cost, layout, {mask}, {});
      const auto ms_of = [&](const Partition& some) {
        return reference_ms(some, keys, profiles, cost);
      };
      const auto counted = ms_of(planned.partition);
      for (size_t rank = 0; rank < profiles.size(); ++rank) {
        CHECK(planned.rank_ms[rank] == Approx(counted[rank]));
      }
      CHECK(planned.ideal_ms <= slowest(planned.rank_ms));
      const double best =
          least_ms(seq_len, 1, profiles, true, [&](const auto& n, const auto& order) {
            return slowest(ms_of(Partition(layout, n, order)));
          });
      // Under zigzag the planner counts half of a rank's tokens on each side: a row of either side
      // may be one too many.
      double row = 0.0;
      for (const RankProfile& profile : profiles) {
        row = std::max(row, 13 / profile.attention_tflops);
      }
      CHECK(slowest(counted) <= best + (layout == Layout::kZigzag ? 2 * row : 1e-9));
    }
  }
}

TEST_CASE("ranks of packed documents end together, equal ones and unequal ones") {
  constexpr int64_t kSeqLen = 131072;
  for (const auto& speeds : {std::vector{1.0, 1.0},
                             std::vector(4, 1.0),
                             std::vector(8, 1.0),
                             {1.0, 0.5, 0.25},
                             {1.0, 0.9, 0.6, 1.0}}) {
    for (int seed = 0; seed < 3; ++seed) {
      std::mt19937 random(seed);
      const Mask mask = documents(kSeqLen, random_documents(random, kSeqLen, 32768));
      const auto profiles = with_speeds(speeds);
      const Plan planned = plan(kSeqLen, profiles, kLayer, {}, {mask}, {});
      CHECK(planned.partition.layout() == Layout::kContiguous);
      CHECK(slowest(planned.rank_ms) <= 1.01 * mean(planned.rank_ms));
      CHECK(planned.ideal_ms >= 0.99 * slowest(planned.rank_ms));
      CHECK(planned.rank_ms == predict(planned.partition, profiles, kLayer, {mask}));
      // Speeds alone do not say how documents are cut.
      const Plan plain = plan(kSeqLen, profiles, kLayer, {}, {}, {});
      CHECK(slowest(predict(plain.partition, profiles, kLayer, {mask})) > slowest(planned.rank_ms));
    }
  }
}

TEST_CASE("limits of memory cap what a rank owns of packed documents") {
  constexpr int64_t kSeqLen = 65536;
  const Mask mask = documents(kSeqLen, {0, 40000, 41000, 42000, 43000, 50000, kSeqLen});
  auto profiles = with_speeds({1, 1, 1, 1});
  const Plan free = plan(kSeqLen, profiles, kLayer, {}, {mask}, {});
  const int64_t most =
      *std::max_element(free.partition.lengths().begin(), free.partition.lengths().end());
  for (RankProfile& profile : profiles) profile.max_tokens = (kSeqLen / 4 + most) / 2;
  const Plan capped = plan(kSeqLen, profiles, kLayer, {}, {mask}, {});
  for (const int64_t length : capped.partition.lengths()) CHECK(length <= profiles[0].max_tokens);
  CHECK(slowest(capped.rank_ms) >= slowest(free.rank_ms));
  CHECK(capped.ideal_ms <= Approx(free.ideal_ms));
  for (RankProfile& profile : profiles) profile.max_tokens = kSeqLen / 4 - 1;
  CHECK_THROWS_AS(plan(kSeqLen, profiles, kLayer, {}, {mask}, {}), std::invalid_argument);
}

TEST_CASE("documents of equal lengths stay whole") {
  std::vector<int64_t> ends;
  for (int64_t end = 0; end <= 131072; end += 2048) ends.push_back(end);
  const auto profiles = with_speeds({1, 1, 1, 1});
  const Plan planned = plan(131072, profiles, kLayer, {}, {documents(131072, ends)}, {});
  CHECK(planned.partition.lengths() == Lengths(4, 32768));
  CHECK(planned.memory_bytes == std::vector<int64_t>(4, 0));
}

TEST_CASE("the layout that is left out follows the mask") {
  constexpr int64_t kSeqLen = 32768;
  const auto profiles = with_speeds({1, 1, 1, 1});
  const auto layout_of = [&](const Mask& mask) {
    return plan(kSeqLen, profiles, kLayer, {}, {mask}, {}).partition.layout();
  };
  CHECK(layout_of({}) == Layout::kZigzag);
  CHECK(layout_of({.causal = false}) == Layout::kZigzag);
  CHECK(layout_of(documents(kSeqLen, {0, kSeqLen})) == Layout::kZigzag);
  CHECK(layout_of(documents(kSeqLen, {0, 9000, kSeqLen})) == Layout::kContiguous);
  CHECK(layout_of(window(kSeqLen, kSeqLen)) == Layout::kZigzag);  // no window
  // As fast in both: with a long window the first contiguous rank owns many more tokens.
  CHECK(layout_of(window(kSeqLen, 1023)) == Layout::kContiguous);
  CHECK(layout_of(window(kSeqLen, kSeqLen - 2048)) == Layout::kZigzag);
  // Where a rank has no room for these tokens, zigzag is faster.
  auto capped = profiles;
  for (RankProfile& profile : capped) profile.max_tokens = kSeqLen / 4;
  const Workload half{window(kSeqLen, kSeqLen / 2)};
  const Plan zigzag = plan(kSeqLen, capped, kLayer, {}, half, {});
  CHECK(zigzag.partition.layout() == Layout::kZigzag);
  const Plan contiguous = plan(kSeqLen, capped, kLayer, Layout::kContiguous, half, {});
  CHECK(slowest(zigzag.rank_ms) < slowest(contiguous.rank_ms));
}

TEST_CASE("a window makes a layer faster, and what travels less") {
  constexpr int64_t kSeqLen = 65536;
  const auto profiles = with_speeds({1, 1, 0.5, 1});
  const Plan plain = plan(kSeqLen, profiles, kLayer, {}, {}, {});
  const Plan windowed = plan(kSeqLen, profiles, kLayer, {}, {window(kSeqLen, 1023)}, {});
  CHECK(slowest(windowed.rank_ms) < 0.6 * slowest(plain.rank_ms));
  CHECK(windowed.ideal_ms > 0.99 * slowest(windowed.rank_ms));
  for (int rank = 0; rank < 4; ++rank) {
    // The rows that are sent, and those that arrive.
    CHECK(windowed.memory_bytes[rank] <= 2 * 1023 * kLayer.kv_bytes);
    CHECK(windowed.memory_bytes[rank] < plain.memory_bytes[rank]);
  }
}

TEST_CASE("training under a mask counts both passes over visible pairs") {
  const Mask mask = documents(4096, {0, 1000, 4096});
  const auto profiles = with_speeds({1, 1});
  const Partition even(Layout::kContiguous, {2048, 2048});
  const auto ms_of = [&](const ModelCost& cost, bool training) {
    return predict(even, profiles, cost, {mask, training});
  };
  CHECK(ms_of({1e3, 0.0}, true)[1] == Approx(3.5 * ms_of({1e3, 0.0}, false)[1]));
  CHECK(ms_of({1e-3, 1e9}, true)[1] == Approx(3 * ms_of({1e-3, 1e9}, false)[1]));
}

TEST_CASE("ten thousand documents are planned in a moment") {
  constexpr int64_t kSeqLen = 1 << 20;
  std::mt19937 random(1);
  const Mask mask = documents(kSeqLen, random_documents(random, kSeqLen, 209));
  REQUIRE(mask.cu_seqlens.size() > 9000);
  auto profiles = with_speeds({1, 0.9, 0.8, 0.7, 1, 0.9, 0.8, 0.7});
  const Plan planned = plan(kSeqLen, profiles, kLayer, {}, {mask}, {});
  CHECK(planned.ideal_ms > 0.99 * slowest(planned.rank_ms));
}
