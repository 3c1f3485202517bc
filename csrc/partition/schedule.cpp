// SPDX-License-Identifier: Apache-2.0
#include "partition/schedule.h"

#include <algorithm>

namespace ringattn {
namespace {

// Whether rectangles and triangles say what is visible.
bool has_closed_form(const Partition& partition, const Mask& mask) {
  return mask.is_plain() && (!mask.causal || partition.layout() != Layout::kPieces);
}

Visit plain_visit(const Partition& partition, int64_t rank, int64_t source, bool causal) {
  Visit visit;
  visit.source = source;
  visit.queries = {0, partition.length(rank)};
  visit.keys = {0, partition.length(source)};
  if (causal && source == rank) {
    visit.visibility = Visibility::kTriangle;  // rows lie in position order, under both layouts
  } else if (causal && partition.place(source) < partition.place(rank)) {
    // The block encloses the rank's (zigzag: its head segment precedes all rows of the rank, its
    // tail segment follows them) or precedes it (contiguous).
    if (partition.layout() == Layout::kZigzag) visit.keys.end = partition.head_length(source);
  } else if (causal) {
    // The block is nested inside the rank's (zigzag: after its head, before its tail) or follows it
    // (contiguous).
    visit.queries.begin = partition.layout() == Layout::kZigzag ? partition.head_length(rank)
                                                                : partition.length(rank);
  }
  const int64_t num_queries = visit.queries.size(), num_keys = visit.keys.size();
  if (num_queries == 0 || num_keys == 0) {
    visit = {};
    visit.source = source;
    return visit;
  }
  visit.num_pairs = visit.visibility == Visibility::kTriangle ? num_keys * (num_keys + 1) / 2
                                                              : num_queries * num_keys;
  return visit;
}

// The positions that a rank's rows see, and the rows of each block among them.
class GeneralVisits {
 public:
  GeneralVisits(const Partition& partition, int64_t rank, const Mask& mask)
      : partition_(partition),
        mask_(mask),
        queries_(partition.rows(rank)),
        seen_(visible_positions(queries_, mask, partition.seq_len())) {}

  Visit with(int64_t source) const {
    const BlockRows keys = partition_.rows(source);
    Visit visit;
    visit.source = source;
    visit.num_pairs = ringattn::num_pairs(queries_, keys, mask_, partition_.seq_len());
    if (!visit.visible()) return visit;
    visit.visibility = Visibility::kIntervals;
    visit.queries = {0, queries_.size()};
    const auto rows_in = [&](const Segment& seen) {
      return RowRange{keys.rows_before(seen.begin), keys.rows_before(seen.end)};
    };
    const auto has_rows = [&](const Segment& seen) { return !rows_in(seen).empty(); };
    visit.keys = {rows_in(*std::find_if(seen_.begin(), seen_.end(), has_rows)).begin,
                  rows_in(*std::find_if(seen_.rbegin(), seen_.rend(), has_rows)).end};
    return visit;
  }

 private:
  const Partition& partition_;
  const Mask& mask_;
  const BlockRows queries_;
  const std::vector<Segment> seen_;
};

std::vector<Visit> plain_schedule(const Partition& partition, int64_t rank, bool causal) {
  std::vector<Visit> visits;
  for (int64_t step = 0; step < partition.world_size(); ++step) {
    visits.push_back(plain_visit(partition, rank, partition.source_at(rank, step), causal));
  }
  // `queries` end with the last row, so the rows that no later visit has are a range too.
  int64_t final_end = partition.length(rank);
  for (auto visit = visits.rbegin(); visit != visits.rend(); ++visit) {
    if (!visit->visible()) continue;
    visit->final = {std::min(visit->queries.begin, final_end), final_end};
    final_end = visit->final.begin;
  }
  return visits;
}

std::vector<Visit> general_schedule(const Partition& partition, int64_t rank, const Mask& mask) {
  const GeneralVisits visits_of(partition, rank, mask);
  std::vector<Visit> visits;
  for (int64_t step = 0; step < partition.world_size(); ++step) {
    visits.push_back(visits_of.with(partition.source_at(rank, step)));
  }
  const auto last = std::find_if(visits.rbegin(), visits.rend(),
                                 [](const Visit& visit) { return visit.visible(); });
  if (last != visits.rend()) last->final = last->queries;
  return visits;
}

}  // namespace

std::vector<Visit> schedule(const Partition& partition, int64_t rank, const Mask& mask) {
  return has_closed_form(partition, mask) ? plain_schedule(partition, rank, mask.causal)
                                          : general_schedule(partition, rank, mask);
}

Schedules schedules(const Partition& partition, const Mask& mask) {
  Schedules all;
  all.reserve(partition.world_size());
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    all.push_back(schedule(partition, rank, mask));
  }
  return all;
}

std::vector<HopPlan> plan_hops(const Partition& partition, int64_t rank, const Mask& mask) {
  const bool closed = has_closed_form(partition, mask);
  const auto keys_seen = [&](int64_t by, int64_t source) {
    return closed ? plain_visit(partition, by, source, mask.causal).keys
                  : GeneralVisits(partition, by, mask).with(source).keys;
  };
  std::vector<HopPlan> hops;
  for (int64_t step = 1; step < partition.world_size(); ++step) {
    HopPlan& hop = hops.emplace_back();
    hop.destination = partition.destination_at(rank, step);
    hop.source = partition.source_at(rank, step);
    hop.sent = keys_seen(hop.destination, rank);
    hop.received = keys_seen(rank, hop.source);
    hop.source_rows = partition.length(hop.source);
  }
  return hops;
}

}  // namespace ringattn
