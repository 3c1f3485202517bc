// SPDX-License-Identifier: Apache-2.0
#include "partition/schedule.h"

#include <algorithm>
#include <utility>

#include "partition/visit_order.h"

namespace ringattn {
namespace {

// Whether lengths alone say in closed form what is visible: a planner asks for many schedules.
bool has_closed_form(const Partition& queries, const Partition& keys, const Mask& mask) {
  if (!mask.is_plain()) return false;
  return !mask.causal || (queries.layout() != Layout::kPieces && queries == keys);
}

// Causal: of equal partitions.
Visit plain_visit(const Partition& queries, const Partition& keys, int64_t rank, int64_t source,
                  bool causal) {
  Visit visit;
  visit.source = source;
  visit.queries = {0, queries.length(rank)};
  RowRange& seen = visit.keys.hull = {0, keys.length(source)};
  if (causal && source == rank) {
    visit.visibility = Visibility::kTriangle;  // rows lie in position order, under both layouts
  } else if (causal && keys.place(source) < keys.place(rank)) {
    // The block encloses the rank's (zigzag: its head segment precedes all rows of the rank, its
    // tail segment follows them) or precedes it (contiguous).
    if (keys.layout() == Layout::kZigzag) seen.end = keys.head_length(source);
  } else if (causal) {
    // The block is nested inside the rank's (zigzag: after its head, before its tail) or follows it
    // (contiguous).
    visit.queries.begin =
        queries.layout() == Layout::kZigzag ? queries.head_length(rank) : queries.length(rank);
  }
  const int64_t num_queries = visit.queries.size(), num_keys = seen.size();
  if (num_queries == 0 || num_keys == 0) {
    visit = {};
    visit.source = source;
    return visit;
  }
  visit.num_pairs = visit.visibility == Visibility::kTriangle ? num_keys * (num_keys + 1) / 2
                                                              : num_queries * num_keys;
  return visit;
}

// The positions that a rank's rows see, and the rows of each block among them: visits of
// kIntervals.
class GeneralVisits {
 public:
  GeneralVisits(const Partition& queries, const Partition& keys, int64_t rank, const Mask& mask)
      : keys_(keys),
        mask_(mask),
        rank_(rank),
        queries_(query_rows(queries, keys, rank)),
        seen_(visible_positions(queries_, mask, keys.seq_len())) {}

  const BlockRows& queries() const { return queries_; }

  Visit with(int64_t source) const {
    const BlockRows keys = keys_.rows(source);
    Visit visit;
    visit.source = source;
    visit.num_pairs = ringattn::num_pairs(queries_, keys, mask_, keys_.seq_len());
    if (!visit.visible()) return visit;
    visit.visibility = Visibility::kIntervals;
    visit.queries = {0, queries_.size()};
    BlockRows::Counter before_begin(keys), before_end(keys);
    for (const Segment& seen : seen_) {
      const RowRange rows = {before_begin.rows_before(seen.begin),
                             before_end.rows_before(seen.end)};
      if (rows.empty()) continue;
      const RowRange gap = {visit.keys.hull.end + kRowsAtGaps, rows.begin - kRowsAtGaps};
      if (source != rank_ && !visit.keys.empty() && gap.size() >= kMinGap) {
        visit.keys.gaps.push_back(gap);
      }
      visit.keys.hull.include(rows);
    }
    return visit;
  }

 private:
  const Partition& keys_;
  const Mask& mask_;
  const int64_t rank_;
  const BlockRows queries_;
  const std::vector<Segment> seen_;
};

// What each query row sees of a block under a causal mask alone: the block's leading rows.
class LeadingRows {
 public:
  LeadingRows(const BlockRows& queries, const BlockRows& keys)
      : queries_(queries), keys_(keys), last_(queries.size() - 1) {}

  // Says in closed form what is visible, if one says it. `visit` is visible.
  bool close(Visit& visit) const {
    const int64_t first = queries_.rows_before(keys_.position(0));
    const int64_t least = seen_by(first), most = seen_by(last_);
    if (least == most) {
      visit.visibility = Visibility::kAll;
    } else if (is_triangle(first, least, most)) {
      visit.visibility = Visibility::kTriangle;
      visit.diagonal = least - 1;
    } else {
      const int64_t split = queries_.rows_before(keys_.position(least));
      if (first > 0 || seen_by(split) < most) return false;
      visit.visibility = Visibility::kSplit;
      visit.split = split;
      visit.early_keys = least;
    }
    visit.queries.begin = first;
    return true;
  }

 private:
  int64_t seen_by(int64_t row) const { return keys_.rows_before(queries_.position(row) + 1); }

  // Whether each row from `first` on sees one key more than the row before it, up to `most`. What
  // rows see changes evenly between the bounds of pieces.
  bool is_triangle(int64_t first, int64_t least, int64_t most) const {
    const auto fits = [&](int64_t row) {
      return row < first || row > last_ || seen_by(row) == std::min(least + row - first, most);
    };
    const auto fits_around = [&](int64_t position) {
      const int64_t row = queries_.rows_before(position);
      return fits(row - 1) && fits(row);
    };
    const auto begin_fits = [&](const Segment& piece) { return fits_around(piece.begin); };
    const auto both_fit = [&](const Segment& piece) {
      return fits_around(piece.begin) && fits_around(piece.end);
    };
    const std::vector<Segment>&of_queries = queries_.pieces(), &of_keys = keys_.pieces();
    return fits(last_) && std::all_of(of_queries.begin(), of_queries.end(), begin_fits) &&
           std::all_of(of_keys.begin(), of_keys.end(), both_fit);
  }

  const BlockRows& queries_;
  const BlockRows& keys_;
  const int64_t last_;
};

// Replaces intervals by closed forms under a causal mask alone, in all visits or in none: the first
// one that sees keys has all rows, and one launch may attend to all.
void close(std::vector<Visit>& visits, const BlockRows& queries, const Partition& keys) {
  std::vector<Visit> closed = visits;
  int64_t first_query = 0;
  bool is_first = true;
  for (Visit& visit : closed) {
    if (!visit.visible()) continue;
    const BlockRows block = keys.rows(visit.source);
    if (!LeadingRows(queries, block).close(visit)) return;
    if (is_first && visit.queries.begin > 0) return;
    is_first = false;
    for (const VisitPart& part : visit.parts()) {
      const int64_t first = part.queries.begin;
      if (first != 0 && first_query != 0 && first != first_query) return;
      first_query = std::max(first_query, first);
    }
  }
  visits = std::move(closed);
}

// One for each step; their `final` is missing.
std::vector<Visit> visits_of(const Partition& queries, const Partition& keys, int64_t rank,
                             const Mask& mask) {
  const VisitOrder order(queries, keys);
  std::vector<Visit> visits;
  const auto visit_all = [&](const auto& with) {
    for (int64_t step = 0; step < keys.world_size(); ++step) {
      visits.push_back(with(order.source_at(rank, step)));
    }
  };
  if (has_closed_form(queries, keys, mask)) {
    visit_all(
        [&](int64_t source) { return plain_visit(queries, keys, rank, source, mask.causal); });
    return visits;
  }
  const GeneralVisits general(queries, keys, rank, mask);
  visit_all([&](int64_t source) { return general.with(source); });
  if (mask.is_plain()) close(visits, general.queries(), keys);
  return visits;
}

}  // namespace

BlockRows query_rows(const Partition& queries, const Partition& keys, int64_t rank) {
  const int64_t before = keys.seq_len() - queries.seq_len();
  std::vector<Segment> pieces = queries.segments(rank);
  for (Segment& piece : pieces) piece = {piece.begin + before, piece.end + before};
  return BlockRows(std::move(pieces));
}

std::vector<VisitPart> Visit::parts() const {
  if (!visible()) return {};
  const RowRange all = {0, keys.size()};
  switch (visibility) {
    case Visibility::kTriangle:
      return {{queries, all, diagonal}};
    case Visibility::kSplit:
      return {{queries, {0, early_keys}, {}}, {{split, queries.end}, {early_keys, all.end}, {}}};
    case Visibility::kAll:
    case Visibility::kIntervals:
      break;
  }
  return {{queries, all, {}}};
}

std::vector<Visit> schedule(const Partition& queries, const Partition& keys, int64_t rank,
                            const Mask& mask) {
  std::vector<Visit> visits = visits_of(queries, keys, rank, mask);
  // `queries` end with the last row, so the rows that no later visit has are a range too.
  int64_t final_end = queries.length(rank);
  for (auto visit = visits.rbegin(); visit != visits.rend(); ++visit) {
    if (!visit->visible()) continue;
    visit->final = {std::min(visit->queries.begin, final_end), final_end};
    final_end = visit->final.begin;
  }
  return visits;
}

std::vector<Visit> schedule(const Partition& partition, int64_t rank, const Mask& mask) {
  return schedule(partition, partition, rank, mask);
}

Schedules schedules(const Partition& partition, const Mask& mask) {
  Schedules all;
  all.reserve(partition.world_size());
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    all.push_back(schedule(partition, rank, mask));
  }
  return all;
}

std::vector<HopPlan> plan_hops(const Partition& queries, const Partition& keys, int64_t rank,
                               const Mask& mask) {
  const bool closed = has_closed_form(queries, keys, mask);
  const auto keys_seen = [&](int64_t by, int64_t source) {
    return closed ? plain_visit(queries, keys, by, source, mask.causal).keys
                  : GeneralVisits(queries, keys, by, mask).with(source).keys;
  };
  const VisitOrder order(queries, keys);
  std::vector<HopPlan> hops;
  for (int64_t step = 1; step < keys.world_size(); ++step) {
    HopPlan& hop = hops.emplace_back();
    hop.destination = order.destination_at(rank, step);
    hop.source = order.source_at(rank, step);
    hop.sent = keys_seen(hop.destination, rank);
    hop.received = keys_seen(rank, hop.source);
    hop.source_rows = keys.length(hop.source);
  }
  return hops;
}

std::vector<HopPlan> plan_hops(const Partition& partition, int64_t rank, const Mask& mask) {
  return plan_hops(partition, partition, rank, mask);
}

}  // namespace ringattn
