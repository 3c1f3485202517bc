// SPDX-License-Identifier: Apache-2.0
#include "planner/ring_simulation.h"

#include <algorithm>
#include <numeric>

#include "core/ceil_div.h"

namespace ringattn {
namespace {

// The messages of a step, each between the owner of a block and the rank that attends to it.
struct Exchange {
  int64_t step;
  int64_t after;   // blocks that both ranks have attended to when a message starts
  int64_t before;  // and those after which a rank waits for it
  const VisitTime* message_ms;
};

// `exchanges` are in the order in which ranks wait for them. In a backward a rank waits for what it
// sends, too.
std::vector<double> simulate(const Schedules& visits_of, const std::vector<Exchange>& exchanges,
                             const VisitTime& attend_ms, bool backward) {
  const int64_t world_size = static_cast<int64_t>(visits_of.size());
  std::vector<double> now(world_size, 0.0), busy = now;
  std::vector<double> moved = now;            // by rank: when its last message ended
  std::vector<std::vector<double>> attended;  // [blocks, rank]: when it had attended to so many
  auto exchange = exchanges.begin();
  for (int64_t blocks = 0; blocks <= world_size; ++blocks) {
    for (int64_t rank = 0; blocks > 0 && rank < world_size; ++rank) {
      const int64_t step = backward ? blocks % world_size : blocks - 1;
      const double ms = attend_ms(rank, visits_of[rank][step]);
      now[rank] += ms;
      busy[rank] += ms;
    }
    attended.push_back(now);
    for (; exchange != exchanges.end() && exchange->before == blocks; ++exchange) {
      std::vector<double> ready = attended[exchange->after];
      for (int64_t rank = 0; rank < world_size; ++rank) {
        ready[rank] = std::max(ready[rank], moved[rank]);
      }
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const Visit& visit = visits_of[rank][exchange->step];
        if (!visit.visible()) continue;
        const double end =
            std::max(ready[visit.source], ready[rank]) + (*exchange->message_ms)(rank, visit);
        moved[visit.source] = std::max(moved[visit.source], end);
        moved[rank] = std::max(moved[rank], end);
      }
      for (int64_t rank = 0; rank < world_size; ++rank) {
        const bool waits = backward || visits_of[rank][exchange->step].visible();
        if (waits) now[rank] = std::max(now[rank], moved[rank]);
      }
    }
  }
  for (int64_t rank = 0; rank < world_size; ++rank) now[rank] -= busy[rank];
  return now;
}

}  // namespace

std::vector<double> simulate_waits(const Schedules& visits_of, const VisitTime& attend_ms,
                                   const VisitTime& transfer_ms, int64_t depth) {
  std::vector<Exchange> exchanges;
  for (int64_t step = 1; step < static_cast<int64_t>(visits_of.size()); ++step) {
    exchanges.push_back({step, std::max<int64_t>(0, step - depth), step, &transfer_ms});
  }
  return simulate(visits_of, exchanges, attend_ms, /*backward=*/false);
}

std::vector<double> simulate_backward_waits(const Schedules& visits_of, const VisitTime& attend_ms,
                                            const VisitTime& transfer_ms,
                                            const VisitTime& return_ms) {
  const int64_t world_size = static_cast<int64_t>(visits_of.size());
  std::vector<Exchange> exchanges;
  for (int64_t step = 1; step < world_size; ++step) {
    exchanges.push_back({step, 0, std::min<int64_t>(step - 1, 1), &transfer_ms});
  }
  for (int64_t step = 1; step < world_size; ++step) {
    const int64_t end_of_round = ceil_div(step, kStepsOfRound) * kStepsOfRound;
    exchanges.push_back({step, step, std::min(end_of_round, world_size), &return_ms});
  }
  return simulate(visits_of, exchanges, attend_ms, /*backward=*/true);
}

int64_t buffered_tokens(const Partition& partition, int64_t rank, const Mask& mask, int64_t depth) {
  const std::vector<HopPlan> hops = plan_hops(partition, rank, mask);
  int64_t tokens = rows_sent(hops).size();
  for (const HopPlan& hop : hops) {
    if (!hop.sent.gaps.empty()) tokens += hop.sent.size();
  }
  const std::vector<int64_t> buffers = buffer_rows(hops, depth);
  return std::accumulate(buffers.begin(), buffers.end(), tokens);
}

int64_t gradient_tokens(const Partition& partition, int64_t rank, const Mask& mask) {
  const std::vector<HopPlan> hops = plan_hops(partition, rank, mask);
  int64_t tokens = partition.length(rank);
  // Those of earlier rounds are summed apart from those that the rank computes.
  if (static_cast<int64_t>(hops.size()) > kStepsOfRound) tokens *= 2;
  for (const auto rows : {&HopPlan::received, &HopPlan::sent}) {
    const std::vector<int64_t> buffers = buffer_rows(hops, kStepsOfRound - 1, rows);
    tokens = std::accumulate(buffers.begin(), buffers.end(), tokens);
  }
  return tokens;
}

}  // namespace ringattn
