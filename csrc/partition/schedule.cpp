// SPDX-License-Identifier: Apache-2.0
#include "partition/schedule.h"

#include <algorithm>

namespace ringattn {
namespace {

// In place: planners make many thousands of them.
void describe(Visit& visit, const Partition& partition, int64_t rank, int64_t source, bool causal) {
  visit.source = source;
  visit.query_end = partition.length(rank);
  visit.key_end = partition.length(source);
  if (causal && source == rank) {
    visit.diagonal = 0;  // rows lie in position order, under both layouts
  } else if (causal && partition.place(source) < partition.place(rank)) {
    // The block lies around mine (zigzag: its head half is before all my rows, its tail half after
    // them) or before mine (contiguous).
    if (partition.layout() == Layout::kZigzag) visit.key_end = partition.head_length(source);
  } else if (causal) {
    // The block is nested inside mine (zigzag: after my head, before my tail) or after mine
    // (contiguous).
    visit.query_begin = partition.layout() == Layout::kZigzag ? partition.head_length(rank)
                                                              : partition.length(rank);
  }
  if (visit.num_queries() == 0 || visit.key_end == 0) {
    visit.query_begin = visit.query_end = visit.key_end = 0;
    visit.diagonal.reset();
  }
}

}  // namespace

std::vector<Visit> schedule(const Partition& partition, int64_t rank, bool causal) {
  std::vector<Visit> visits(partition.world_size());
  for (int64_t step = 0; step < partition.world_size(); ++step) {
    describe(visits[step], partition, rank, partition.visitor(rank, step), causal);
  }
  // Every visit reaches from some row to the last one, so what no later visit reaches is a range
  // too.
  int64_t reached_later = partition.length(rank);
  for (auto visit = visits.rbegin(); visit != visits.rend(); ++visit) {
    if (!visit->visible()) continue;
    visit->final_begin = std::min(visit->query_begin, reached_later);
    visit->final_end = reached_later;
    reached_later = visit->final_begin;
  }
  return visits;
}

Schedules schedules(const Partition& partition, bool causal) {
  Schedules of_ranks;
  of_ranks.reserve(partition.world_size());
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    of_ranks.push_back(schedule(partition, rank, causal));
  }
  return of_ranks;
}

int64_t rows_seen(const Partition& partition, int64_t rank, int64_t source, bool causal) {
  Visit visit;
  describe(visit, partition, rank, source, causal);
  return visit.key_end;
}

}  // namespace ringattn
