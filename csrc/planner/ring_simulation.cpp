// SPDX-License-Identifier: Apache-2.0
#include "planner/ring_simulation.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "partition/schedule.h"

namespace ringattn {
namespace {

// The time of a message over the slower of two ranks' links.
double transfer_ms(const RankProfile& from, const RankProfile& to, double bytes) {
  double ms = 0.0;
  for (const RankProfile* end : {&from, &to}) {
    const double latency = end->link_latency_us.value_or(0.0) / 1e3;
    ms = std::max(ms, latency + (end->link_gbps ? bytes / (*end->link_gbps * 1e6) : 0.0));
  }
  return ms;
}

// For each rank: when it has attended its last block, and how much of that time it computed.
struct Ends {
  std::vector<double> all_ms, busy_ms;
};

Ends simulate(const Schedules& visits_of, const std::vector<RankProfile>& profiles,
              const ModelCost& cost, int64_t depth) {
  const int64_t world_size = static_cast<int64_t>(visits_of.size());
  std::vector<double> attended(world_size * world_size);  // [step, rank]: when the step ended
  std::vector<double> busy(world_size, 0.0);              // by rank: at work so far
  const auto attend = [&](int64_t rank, int64_t step, double begin) {
    const double flops =
        cost.attention_flops * static_cast<double>(visits_of[rank][step].num_pairs());
    const double ms = flops / (profiles[rank].attention_tflops * kFlopsPerMs);
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
      const double bytes = static_cast<double>(visit.rows_used() * cost.kv_bytes);
      const double end = std::max(ready[visit.source], ready[rank]) +
                         transfer_ms(profiles[visit.source], profiles[rank], bytes);
      moved[visit.source] = std::max(moved[visit.source], end);
      moved[rank] = std::max(moved[rank], end);
    }
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const double begin = attended[(step - 1) * world_size + rank];
      attend(rank, step, visits_of[rank][step].visible() ? std::max(begin, moved[rank]) : begin);
    }
  }
  return {{attended.end() - world_size, attended.end()}, std::move(busy)};
}

}  // namespace

std::vector<double> simulate_ring(const Partition& partition,
                                  const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                  Mask mask, int64_t depth) {
  return simulate(schedules(partition, mask), profiles, cost, depth).all_ms;
}

std::vector<double> simulate_waits(const Schedules& visits_of,
                                   const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                   int64_t depth) {
  auto [waits, busy] = simulate(visits_of, profiles, cost, depth);
  for (size_t rank = 0; rank < waits.size(); ++rank) waits[rank] -= busy[rank];
  return waits;
}

int64_t buffered_tokens(const Partition& partition, int64_t rank, Mask mask, int64_t depth) {
  const auto visits = schedule(partition, rank, mask);
  const int64_t num_hops = partition.world_size() - 1;
  const int64_t num_buffers = std::min(num_hops, depth + 1);
  std::vector<int64_t> buffers(num_buffers);
  int64_t sent = 0;
  for (int64_t step = 1; step <= num_hops; ++step) {
    sent = std::max(sent, rows_used(partition, partition.destination_at(rank, step), rank, mask));
    int64_t& buffer = buffers[(step - 1) % num_buffers];
    buffer = std::max(buffer, visits[step].rows_used());
  }
  return std::accumulate(buffers.begin(), buffers.end(), sent);
}

}  // namespace ringattn
