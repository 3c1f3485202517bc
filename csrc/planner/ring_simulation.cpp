// SPDX-License-Identifier: Apache-2.0
#include "planner/ring_simulation.h"

#include <algorithm>
#include <numeric>

namespace ringattn {

std::vector<double> simulate_waits(const Schedules& visits_of, const VisitTime& attend_ms,
                                   const VisitTime& transfer_ms, int64_t depth) {
  const int64_t world_size = static_cast<int64_t>(visits_of.size());
  std::vector<double> attended(world_size * world_size);  // [step, rank]: when the step ended
  std::vector<double> busy(world_size, 0.0);              // by rank: at work so far
  const auto attend = [&](int64_t rank, int64_t step, double begin) {
    const double ms = attend_ms(rank, visits_of[rank][step]);
    attended[step * world_size + rank] = begin + ms;
    busy[rank] += ms;
  };
  for (int64_t rank = 0; rank < world_size; ++rank) attend(rank, 0, 0.0);

  std::vector<double> moved(world_size, 0.0);  // by rank: when its last message ended
  std::vector<double> ready(world_size);       // by rank: when its next one may begin
  for (int64_t step = 1; step < world_size; ++step) {
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const int64_t behind = step - 1 - depth;
      ready[rank] = moved[rank];
      if (behind >= 0) {
        ready[rank] = std::max(ready[rank], attended[behind * world_size + rank]);
      }
    }
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const Visit& visit = visits_of[rank][step];
      if (!visit.visible()) continue;
      const double end = std::max(ready[visit.source], ready[rank]) + transfer_ms(rank, visit);
      moved[visit.source] = std::max(moved[visit.source], end);
      moved[rank] = std::max(moved[rank], end);
    }
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const double begin = attended[(step - 1) * world_size + rank];
      attend(rank, step, visits_of[rank][step].visible() ? std::max(begin, moved[rank]) : begin);
    }
  }
  std::vector<double> waits(attended.end() - world_size, attended.end());
  for (int64_t rank = 0; rank < world_size; ++rank) waits[rank] -= busy[rank];
  return waits;
}

int64_t buffered_tokens(const Partition& partition, int64_t rank, const Mask& mask, int64_t depth) {
  const std::vector<HopPlan> hops = plan_hops(partition, rank, mask);
  const int64_t staged = rows_sent(hops).size();
  const std::vector<int64_t> buffers = buffer_rows(hops, depth);
  return std::accumulate(buffers.begin(), buffers.end(), staged);
}

int64_t gradient_tokens(const Partition& partition, int64_t rank, const Mask& mask) {
  const std::vector<HopPlan> hops = plan_hops(partition, rank, mask);
  int64_t tokens = partition.length(rank);
  // All but the last that come back are summed apart from those that the rank computes.
  for (size_t hop = 0; hop + 1 < hops.size(); ++hop) {
    if (hops[hop].sent.empty()) continue;
    tokens *= 2;
    break;
  }
  for (const auto rows : {&HopPlan::received, &HopPlan::sent}) {
    const std::vector<int64_t> buffers = buffer_rows(hops, /*depth=*/1, rows);
    tokens = std::accumulate(buffers.begin(), buffers.end(), tokens);
  }
  return tokens;
}

}  // namespace ringattn
