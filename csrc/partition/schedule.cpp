// SPDX-License-Identifier: Apache-2.0
#include "partition/schedule.h"

#include <algorithm>

namespace ringattn {
namespace {

// In place: a planner computes many thousands of visits.
void describe(Visit& visit, const Partition& partition, int64_t rank, int64_t source, bool causal) {
  visit.source = source;
  visit.query_end = partition.length(rank);
  visit.key_end = partition.length(source);
  if (causal && source == rank) {
    visit.diagonal = 0;  // rows lie in position order, under both layouts
  } else if (causal && partition.place(source) < partition.place(rank)) {
    // The block encloses the rank's (zigzag: its head segment precedes all rows of the rank, its
    // tail segment follows them) or precedes it (contiguous).
    if (partition.layout() == Layout::kZigzag) visit.key_end = partition.head_length(source);
  } else if (causal) {
    // The block is nested inside the rank's (zigzag: after its head, before its tail) or follows it
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
    describe(visits[step], partition, rank, partition.source_at(rank, step), causal);
  }
  // Every visit's rows end with the last row, so the rows that no later visit has are a range too.
  int64_t final_end = partition.length(rank);
  for (auto visit = visits.rbegin(); visit != visits.rend(); ++visit) {
    if (!visit->visible()) continue;
    visit->final_begin = std::min(visit->query_begin, final_end);
    visit->final_end = final_end;
    final_end = visit->final_begin;
  }
  return visits;
}

Schedules schedules(const Partition& partition, bool causal) {
  Schedules all;
  all.reserve(partition.world_size());
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    all.push_back(schedule(partition, rank, causal));
  }
  return all;
}

int64_t rows_used(const Partition& partition, int64_t rank, int64_t source, bool causal) {
  Visit visit;
  describe(visit, partition, rank, source, causal);
  return visit.key_end;
}

}  // namespace ringattn
