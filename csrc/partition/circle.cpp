// SPDX-License-Identifier: Apache-2.0
#include "partition/circle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace ringattn {

Circle::Circle(const VisiblePairs& pairs, const std::vector<RowRun>& runs) : pairs_(pairs) {
  for (const RowRun& run : runs) slices_.push_back(slice(run, run.begin, run.end));
  sum_up();
}

Circle::Slice Circle::slice(const RowRun& run, int64_t begin, int64_t end) const {
  return {&run, begin, end, pairs_.keys_of(run.document, begin, end)};
}

void Circle::sum_up() {
  rows_before_.assign(1, 0);
  pairs_before_.assign(1, 0);
  fetched_before_.assign(1, 0);
  for (size_t i = 0; i < slices_.size(); ++i) {
    const Slice& slice = slices_[i];
    const int64_t rows = slice.end - slice.begin;
    rows_before_.push_back(rows_before_[i] + rows);
    pairs_before_.push_back(pairs_before_[i] + slice.run->pairs_of(slice.begin, slice.end));
    fetched_before_.push_back(fetched_before_[i] + fetched_after(i, slice.keys, rows));
  }
}

// Rows that the first `rows` rows of a slice, which see `keys`, add to those that are fetched for
// the slice before it.
int64_t Circle::fetched_after(size_t slice, Segment keys, int64_t rows) const {
  const Slice& before = slices_[previous(slice)];
  const int64_t seen = before.end <= slices_[slice].begin ? before.keys.end : 0;
  return keys.end - std::max(keys.begin, seen) - rows;
}

Circle::Place Circle::after(Place place, int64_t rows) const {
  while (rows >= slices_[place.slice].end - place.row) {
    rows -= slices_[place.slice].end - place.row;
    place.slice = next(place.slice);
    place.row = slices_[place.slice].begin;
  }
  return {place.slice, place.row + rows};
}

Circle::Place Circle::row_before(Place place) const {
  if (place.row > slices_[place.slice].begin) return {place.slice, place.row - 1};
  const size_t slice = previous(place.slice);
  return {slice, slices_[slice].end - 1};
}

// Pairs of the rows before `place`, from the circle's seam.
int64_t Circle::pairs_until(Place place) const {
  const Slice& slice = slices_[place.slice];
  return pairs_before_[place.slice] +
         (place.row == slice.begin ? 0 : slice.run->pairs_of(slice.begin, place.row));
}

int64_t Circle::num_pairs(const Arc& arc) const {
  const int64_t pairs = pairs_until(arc.past) - pairs_until(arc.first);
  return pairs > 0 ? pairs : pairs + num_pairs();
}

int64_t Circle::rows_to_fetch(const Arc& arc) const {
  const auto& [start, first, past] = arc;
  const Place last = row_before(past);
  const Place before = row_before(first);
  const bool in_one_slice = first.slice == last.slice && first.row <= last.row;
  const auto keys_of = [&](Place place, int64_t begin, int64_t end) {
    return pairs_.keys_of(slices_[place.slice].run->document, begin, end);
  };

  const int64_t first_end = in_one_slice ? last.row + 1 : slices_[first.slice].end;
  const Segment first_keys = keys_of(first, first.row, first_end);
  int64_t fetched = first_keys.end - first_keys.begin - (first_end - first.row);
  int64_t last_begin = first.row;
  if (!in_one_slice) {
    last_begin = slices_[last.slice].begin;
    fetched += fetched_before_[last.slice] - fetched_before_[first.slice + 1];
    if (last.slice <= first.slice) fetched += fetched_before_.back();
    fetched += fetched_after(last.slice, keys_of(last, last_begin, last.row + 1),
                             last.row + 1 - last_begin);
  }
  // Rows of the arc that its neighbours in the circle see.
  if (past.row > last.row) {
    const int64_t seen = std::max(last_begin, keys_of(past, past.row, past.row + 1).begin);
    fetched += std::max<int64_t>(0, last.row + 1 - seen);
  }
  if (before.row < first.row) {
    const int64_t seen = std::min(first_end, keys_of(before, before.row, before.row + 1).end);
    fetched += std::max<int64_t>(0, seen - first.row);
  }
  return fetched;
}

// All arcs of `rows` rows between which the number of pairs only rises or only falls: those that
// begin or end with a slice, and those whose first row sees as much as the next one.
template <typename Consider>
void Circle::for_each_turn(int64_t rows, const Consider& consider) const {
  const Place seam{0, slices_.front().begin};
  Arc arc{0, seam, after(seam, rows)};
  while (arc.start < num_rows()) {
    consider(arc);
    const Slice &lost = slices_[arc.first.slice], &gained = slices_[arc.past.slice];
    int64_t shift = std::min(lost.end - arc.first.row, gained.end - arc.past.row);
    // By how much a shift by one row changes the pairs, and how that changes.
    const int64_t gain = gained.run->pairs_at(arc.past.row) - lost.run->pairs_at(arc.first.row);
    const int64_t slope = gained.run->slope - lost.run->slope;
    if (gain * slope < 0) {
      shift = std::min(shift, std::max<int64_t>(1, std::abs(gain) / std::abs(slope)));
    }
    arc = {arc.start + shift, after(arc.first, shift), after(arc.past, shift)};
  }
  consider({arc.start, seam, after(seam, rows)});
}

int64_t Circle::best_start(const Goal& goal) const {
  int64_t best = 0, least_fetched = 0;
  bool best_allowed = false;
  double best_miss = std::numeric_limits<double>::infinity();
  const auto miss = [&](const Arc& arc) {
    return static_cast<double>(num_pairs(arc)) - goal.pairs;
  };
  const auto consider = [&](const Arc& arc) {
    const double missed = miss(arc), pairs = missed + goal.pairs;
    const bool allowed = goal.least <= pairs && pairs <= goal.most;
    if (best_allowed && !allowed) return missed;
    const int64_t fetched = allowed ? rows_to_fetch(arc) : 0;
    if (best_allowed == allowed &&
        (fetched != least_fetched ? fetched > least_fetched : std::abs(missed) >= best_miss)) {
      return missed;
    }
    best = arc.start % num_rows();
    best_allowed = allowed;
    best_miss = std::abs(missed);
    least_fetched = fetched;
    return missed;
  };
  Arc last;
  double last_miss = 0.0;
  for_each_turn(goal.rows, [&](const Arc& arc) {
    const double missed = consider(arc);
    // The goal lies between two turns: the arcs on both sides of it are nearest.
    if (arc.start > 0 && (missed < 0.0) != (last_miss < 0.0)) {
      const auto shifted = [&](int64_t start) {
        const int64_t shift = start - last.start;
        return Arc{start, after(last.first, shift), after(last.past, shift)};
      };
      int64_t low = last.start, high = arc.start;
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        ((miss(shifted(middle)) < 0.0) == (last_miss < 0.0) ? low : high) = middle;
      }
      consider(shifted(low));
      consider(shifted(high));
    }
    last = arc;
    last_miss = missed;
  });
  return best;
}

std::vector<Segment> Circle::take_arc(const Goal& goal) {
  const int64_t start = best_start(goal);
  // The arc is [start, stop) and, where it passes the circle's seam, [0, over).
  const int64_t stop = std::min(start + goal.rows, num_rows());
  const int64_t over = start + goal.rows - stop;
  std::vector<Slice> left;
  std::vector<Segment> arc, wrapped;
  for (size_t i = 0; i < slices_.size(); ++i) {
    const Slice& whole = slices_[i];
    const int64_t bounds[] = {rows_before_[i], over, start, stop, rows_before_[i + 1]};
    for (int part = 0; part < 4; ++part) {
      const int64_t begin = std::clamp(bounds[part], bounds[0], bounds[4]);
      const int64_t end = std::clamp(bounds[part + 1], bounds[0], bounds[4]);
      if (begin >= end) continue;
      const int64_t row = whole.begin + begin - rows_before_[i], past = row + end - begin;
      if (part == 0) {
        wrapped.push_back({row, past});
      } else if (part == 2) {
        arc.push_back({row, past});
      } else {
        left.push_back(past - row < whole.end - whole.begin ? slice(*whole.run, row, past) : whole);
      }
    }
  }
  arc.insert(arc.end(), wrapped.begin(), wrapped.end());
  slices_ = std::move(left);
  sum_up();
  return arc;
}

}  // namespace ringattn
