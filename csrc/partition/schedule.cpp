// SPDX-License-Identifier: Apache-2.0
#include "partition/schedule.h"

#include <algorithm>
#include <optional>

namespace ringattn {
namespace {

// The rows of `rank` that see keys of the block of `source`.
std::optional<Band> band_of(const Partition& partition, int64_t rank, int64_t source, Mask mask) {
  Band band = Band::whole(partition.length(rank), partition.length(source));
  if (mask.causal && source == rank) {
    band.upper = 0;  // rows lie in position order, under both layouts
  } else if (mask.causal && partition.place(source) < partition.place(rank)) {
    // The block encloses the rank's (zigzag: its head segment precedes all rows of the rank, its
    // tail segment follows them) or precedes it (contiguous).
    if (partition.layout() == Layout::kZigzag) band.key_end = partition.head_length(source);
  } else if (mask.causal) {
    // The block is nested inside the rank's (zigzag: after its head, before its tail) or follows it
    // (contiguous).
    band.query_begin = partition.layout() == Layout::kZigzag ? partition.head_length(rank)
                                                             : partition.length(rank);
  }
  if (band.num_queries() == 0 || band.num_keys() == 0) return {};
  return band;
}

}  // namespace

int64_t Visit::rows_used() const {
  int64_t rows = 0;
  for (const Band& band : bands) rows = std::max(rows, band.key_end);
  return rows;
}

int64_t Visit::num_pairs() const {
  int64_t pairs = 0;
  for (const Band& band : bands) pairs += band.num_pairs();
  return pairs;
}

std::vector<Visit> schedule(const Partition& partition, int64_t rank, Mask mask) {
  std::vector<Visit> visits(partition.world_size());
  for (int64_t step = 0; step < partition.world_size(); ++step) {
    Visit& visit = visits[step];
    visit.source = partition.source_at(rank, step);
    if (const auto band = band_of(partition, rank, visit.source, mask)) visit.bands = {*band};
  }
  // Every band ends with the last row, so the rows that no later visit has are a range too.
  int64_t final_end = partition.length(rank);
  for (auto visit = visits.rbegin(); visit != visits.rend(); ++visit) {
    if (!visit->visible()) continue;
    visit->final_begin = std::min(visit->bands.front().query_begin, final_end);
    visit->final_end = final_end;
    final_end = visit->final_begin;
  }
  return visits;
}

Schedules schedules(const Partition& partition, Mask mask) {
  Schedules all;
  all.reserve(partition.world_size());
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    all.push_back(schedule(partition, rank, mask));
  }
  return all;
}

std::vector<HopPlan> plan_hops(const Partition& partition, int64_t rank, Mask mask) {
  std::vector<HopPlan> hops;
  for (int64_t step = 1; step < partition.world_size(); ++step) {
    HopPlan& hop = hops.emplace_back();
    hop.destination = partition.destination_at(rank, step);
    hop.source = partition.source_at(rank, step);
    hop.rows_sent = rows_used(partition, hop.destination, rank, mask);
    hop.rows_received = rows_used(partition, rank, hop.source, mask);
    hop.source_rows = partition.length(hop.source);
  }
  return hops;
}

int64_t rows_used(const Partition& partition, int64_t rank, int64_t source, Mask mask) {
  const auto band = band_of(partition, rank, source, mask);
  return band ? band->key_end : 0;
}

}  // namespace ringattn
