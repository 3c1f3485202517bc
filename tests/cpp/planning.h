// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "planner/planner.h"

// What tests of plans share.

namespace ringattn::testing {

using Lengths = std::vector<int64_t>;

// A layer of LLaMA-3-8B, and its attention alone.
inline const ModelCost kAttention{16384.0, 0.0, 4096};
inline const ModelCost kLayer{16384.0, 436.2e6, 4096};
constexpr Layout kLayouts[] = {Layout::kZigzag, Layout::kContiguous};

/// Each as fast as this share of an H100.
inline std::vector<RankProfile> with_speeds(const std::vector<double>& speeds) {
  std::vector<RankProfile> profiles(speeds.size());
  for (size_t rank = 0; rank < speeds.size(); ++rank) {
    profiles[rank].attention_tflops = 550.0 * speeds[rank];
    profiles[rank].linear_tflops = 700.0 * speeds[rank];
  }
  return profiles;
}

inline double slowest(const std::vector<double>& ms) {
  return *std::max_element(ms.begin(), ms.end());
}

inline Plan make_plan(int64_t seq_len, const std::vector<RankProfile>& profiles,
                      const ModelCost& cost = kAttention, Layout layout = Layout::kZigzag,
                      Workload workload = {}, std::optional<int64_t> depth = std::nullopt) {
  return plan(seq_len, profiles, cost, layout, workload, depth);
}

/// The least of ms(lengths, order) over all lengths in steps of `unit` that memory allows, and all
/// orders, or the first of them where none of them counts.
template <typename Ms>
double least_ms(int64_t seq_len, int64_t unit, const std::vector<RankProfile>& profiles,
                bool orders_count, const Ms& ms) {
  Lengths lengths(profiles.size()), order(profiles.size());
  double best = std::numeric_limits<double>::infinity();
  const auto deal = [&](const auto& self, size_t rank, int64_t left) -> void {
    const int64_t room = std::min(left, profiles[rank].max_tokens.value_or(left));
    if (rank + 1 < profiles.size()) {
      for (lengths[rank] = 0; lengths[rank] <= room; lengths[rank] += unit) {
        self(self, rank + 1, left - lengths[rank]);
      }
      return;
    }
    if (room < left) return;
    lengths[rank] = left;
    std::iota(order.begin(), order.end(), 0);
    do {
      best = std::min(best, ms(lengths, order));
    } while (orders_count && std::next_permutation(order.begin(), order.end()));
  };
  deal(deal, 0, seq_len);
  return best;
}

/// The least of `predict`.
inline double least_predicted_ms(int64_t seq_len, int64_t unit,
                                 const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                 Layout layout, const Workload& workload,
                                 std::optional<int64_t> depth = std::nullopt) {
  return least_ms(seq_len, unit, profiles, /*orders_count=*/true,
                  [&](const Lengths& lengths, const Lengths& order) {
                    const Partition partition(layout, lengths, order);
                    return slowest(predict(partition, profiles, cost, workload, depth));
                  });
}

}  // namespace ringattn::testing
