// SPDX-License-Identifier: Apache-2.0
#include "partition/ring_simulation.h"

#include <algorithm>
#include <numeric>

#include "partition/schedule.h"

namespace ringattn {
namespace {

// Of a message over the slower of two ranks' links.
double transfer_ms(const RankProfile& from, const RankProfile& to, double bytes) {
  double ms = 0.0;
  for (const RankProfile* end : {&from, &to}) {
    const double latency = end->link_latency_us.value_or(0.0) / 1e3;
    ms = std::max(ms, latency + (end->link_gbps ? bytes / (*end->link_gbps * 1e6) : 0.0));
  }
  return ms;
}

}  // namespace

std::vector<double> simulate_ring(const Partition& partition,
                                  const std::vector<RankProfile>& profiles, const ModelCost& cost,
                                  bool causal, int64_t depth) {
  const int64_t world_size = partition.world_size();
  std::vector<std::vector<Visit>> visits;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    visits.push_back(schedule(partition, rank, causal));
  }
  std::vector<std::vector<double>> attended(world_size);  // by rank: when each step so far ended
  std::vector<double> moved(world_size, 0.0);             // by rank: when its last message ended
  const auto attend = [&](int64_t rank, int64_t step, double begin) {
    const double flops = cost.attention_flops * static_cast<double>(visits[rank][step].num_pairs());
    attended[rank].push_back(begin + flops / (profiles[rank].attention_tflops * kFlopsPerMs));
  };
  for (int64_t rank = 0; rank < world_size; ++rank) attend(rank, 0, 0.0);

  for (int64_t step = 1; step < world_size; ++step) {
    std::vector<double> ready = moved;
    for (int64_t rank = 0; rank < world_size && step > depth; ++rank) {
      ready[rank] = std::max(ready[rank], attended[rank][step - 1 - depth]);
    }
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const auto arrival = [&](int64_t from, int64_t to) {
        const int64_t rows = visits[to][step].key_end;
        if (rows == 0) return moved[rank];
        const double bytes = static_cast<double>(rows * cost.kv_bytes);
        return std::max(ready[from], ready[to]) + transfer_ms(profiles[from], profiles[to], bytes);
      };
      const double over = std::max(arrival(partition.neighbour(rank, -step), rank),
                                   arrival(rank, partition.neighbour(rank, step)));
      const double begin = attended[rank].back();
      attend(rank, step, visits[rank][step].visible() ? std::max(begin, over) : begin);
      moved[rank] = over;
    }
  }
  std::vector<double> ends;
  for (const auto& steps : attended) ends.push_back(steps.back());
  return ends;
}

int64_t buffered_tokens(const Partition& partition, int64_t rank, bool causal, int64_t depth) {
  const auto visits = schedule(partition, rank, causal);
  const int64_t num_hops = partition.world_size() - 1;
  const int64_t num_buffers = std::min(num_hops, depth + 1);
  std::vector<int64_t> buffers(num_buffers);
  int64_t sent = 0;
  for (int64_t step = 1; step <= num_hops; ++step) {
    const int64_t destination = partition.neighbour(rank, step);
    sent = std::max(sent, schedule(partition, destination, causal)[step].key_end);
    int64_t& buffer = buffers[(step - 1) % num_buffers];
    buffer = std::max(buffer, visits[step].key_end);
  }
  return std::accumulate(buffers.begin(), buffers.end(), sent);
}

}  // namespace ringattn
