// SPDX-License-Identifier: Apache-2.0
#include "partition/packed.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "partition/circle.h"

namespace ringattn {
namespace {

// The part of the tolerance that arcs use: sums of doubles round.
constexpr double kAim = 0.95 * kPairTolerance;

// Into how many sections long documents are cut: the best of these is taken.
constexpr int64_t kNumSections[] = {1, 2, 3, 4, 6, 8};
constexpr size_t kMaxWork = 1 << 18;  // runs times ranks; above, the first is taken

// What a rank should own.
struct Target {
  int64_t rank = 0;
  int64_t tokens = 0;
  double pairs = 0.0;
};

// Weights that add up to 1.
std::vector<double> normalised(std::vector<double> weights, int64_t world_size) {
  if (world_size < 1) {
    throw std::invalid_argument("world_size must be at least 1, got " + std::to_string(world_size));
  }
  if (weights.empty()) weights.assign(world_size, 1.0);
  if (static_cast<int64_t>(weights.size()) != world_size) {
    throw std::invalid_argument("weights must name each of the " + std::to_string(world_size) +
                                " ranks once, got " + std::to_string(weights.size()));
  }
  for (const double weight : weights) {
    if (!(weight >= 0.0 && std::isfinite(weight))) {
      throw std::invalid_argument("weights must be finite and not negative, got " +
                                  std::to_string(weight));
    }
  }
  const double largest = *std::max_element(weights.begin(), weights.end());
  if (largest == 0.0) {
    throw std::invalid_argument("weights must name a rank that gets tokens, got only 0");
  }
  for (double& weight : weights) weight /= largest;  // so that their sum is finite
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= sum;
  return weights;
}

// Rounded down, then up where most is missing; equal ranks in their order.
std::vector<int64_t> whole_tokens(const std::vector<double>& weights, int64_t seq_len) {
  std::vector<int64_t> tokens, ranks;
  std::vector<double> missing;
  int64_t left = seq_len;
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    const double exact = weights[rank] * static_cast<double>(seq_len);
    tokens.push_back(std::min(left, static_cast<int64_t>(exact)));
    missing.push_back(exact - static_cast<double>(tokens.back()));
    if (weights[rank] > 0.0) ranks.push_back(static_cast<int64_t>(rank));
    left -= tokens.back();
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int64_t a, int64_t b) { return missing[a] > missing[b]; });
  for (size_t i = 0; left > 0; ++i, --left) ++tokens[ranks[i % ranks.size()]];
  return tokens;
}

// Of ranks with tokens. Those with few come first: they have the most arcs to choose from.
std::vector<Target> targets_of(const VisiblePairs& pairs, const std::vector<double>& weights) {
  const auto tokens = whole_tokens(weights, pairs.seq_len());
  const double all = static_cast<double>(pairs.before(pairs.seq_len()));
  std::vector<Target> targets;
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    if (tokens[rank] == 0) continue;
    targets.push_back({static_cast<int64_t>(rank), tokens[rank], weights[rank] * all});
  }
  std::stable_sort(targets.begin(), targets.end(),
                   [](const Target& a, const Target& b) { return a.tokens < b.tokens; });
  return targets;
}

// Ascending, neighbours joined.
std::vector<Segment> joined(std::vector<Segment> pieces) {
  std::sort(pieces.begin(), pieces.end(),
            [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  std::vector<Segment> result;
  for (const Segment& piece : pieces) {
    if (!result.empty() && result.back().end == piece.begin) {
      result.back().end = piece.end;
    } else {
      result.push_back(piece);
    }
  }
  return result;
}

// The runs in the order of the circle. Documents of more than `most` pairs, which one rank cannot
// own, are cut into sections, and the other documents lie between all sections. An arc may then
// hold parts of the head and of the tail of a long document, as under zigzag: its rank fetches only
// what lies between them.
std::vector<RowRun> in_sections(const VisiblePairs& pairs, double most, int64_t num_sections) {
  std::vector<RowRun> sections, others, runs;
  int64_t other_rows = 0;
  for (const RowRun& run : pairs.runs()) {
    const auto [first, past] = run.document;
    if (static_cast<double>(pairs.before(past) - pairs.before(first)) <= most) {
      others.push_back(run);
      other_rows += run.end - run.begin;
      continue;
    }
    const auto cut = [&, first = first, length = past - first](int64_t section) {
      return std::clamp(first + length * section / num_sections, run.begin, run.end);
    };
    for (int64_t section = 0; section < num_sections; ++section) {
      const int64_t begin = cut(section), end = cut(section + 1);
      if (begin < end) sections.push_back(run.part(begin, end));
    }
  }
  const int64_t num_gaps = static_cast<int64_t>(sections.size());
  int64_t rows = 0;
  auto other = others.begin();
  for (int64_t gap = 0; gap < num_gaps; ++gap) {
    runs.push_back(sections[gap]);
    for (; other != others.end() && rows < other_rows * (gap + 1) / num_gaps; ++other) {
      rows += other->end - other->begin;
      runs.push_back(*other);
    }
  }
  runs.insert(runs.end(), other, others.end());
  return runs;
}

double most_pairs(const VisiblePairs& pairs, const Target& target, double tolerance) {
  return target.pairs +
         std::max(tolerance * target.pairs, static_cast<double>(pairs.longest_row()));
}

// One arc of the circle of `runs` for each rank.
Pieces arcs_of(const VisiblePairs& pairs, const std::vector<RowRun>& runs,
               const std::vector<Target>& targets, int64_t world_size) {
  Circle circle(pairs, runs);
  Pieces pieces(world_size);
  double later_pairs = static_cast<double>(circle.num_pairs());
  double later_rows = static_cast<double>(targets.size() * pairs.longest_row());
  for (const Target& target : targets) {
    const double left = static_cast<double>(circle.num_pairs());
    const double fair = left / later_pairs;  // of what it should be
    later_pairs -= target.pairs;
    later_rows -= static_cast<double>(pairs.longest_row());
    // What this rank lacks, later ranks have too much: at most half of what they may, and nothing
    // where they need all of that for their whole rows.
    const double excess = std::max(0.0, kAim / 2 * later_pairs - later_rows);
    Circle::Goal goal;
    goal.rows = target.tokens;
    goal.pairs = target.pairs * fair;
    goal.least = std::max(left - later_pairs - excess, (1 - kAim) * target.pairs);
    goal.most = most_pairs(pairs, target, kAim);
    pieces[target.rank] = joined(circle.take_arc(goal));
  }
  return pieces;
}

bool balanced(const VisiblePairs& pairs, const std::vector<Target>& targets, const Pieces& pieces) {
  return std::all_of(targets.begin(), targets.end(), [&](const Target& target) {
    int64_t owned = 0;
    for (const Segment& piece : pieces[target.rank]) {
      owned += pairs.before(piece.end) - pairs.before(piece.begin);
    }
    return static_cast<double>(owned) <= most_pairs(pairs, target, kPairTolerance);
  });
}

// The rank that fetches most decides when a ring ends; the others share its links.
int64_t cost_of(const VisiblePairs& pairs, const Pieces& pieces) {
  int64_t most = 0, sum = 0;
  for (const auto& owned : pieces) {
    const int64_t fetched = rows_fetched(pairs, owned);
    most = std::max(most, fetched);
    sum += fetched;
  }
  return 2 * most * static_cast<int64_t>(pieces.size()) + sum;
}

// Rows one by one, those that see most first, by Tijdeman's rule for the chairman assignment
// problem (https://doi.org/10.1016/0012-365X(80)90269-1): of any number of first rows, a rank has
// its weight's share within less than one. By partial summation its pairs then differ from their
// share by less than the longest row's.
Pieces dealt(const VisiblePairs& pairs, const std::vector<double>& weights) {
  std::vector<std::pair<int64_t, int64_t>> rows;  // pairs, position
  for (const RowRun& run : pairs.runs()) {
    for (int64_t row = run.begin; row < run.end; ++row) rows.emplace_back(run.pairs_at(row), row);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  const auto num_ranks =
      std::count_if(weights.begin(), weights.end(), [](double weight) { return weight > 0.0; });
  const double reserve = num_ranks > 1 ? 0.5 / static_cast<double>(num_ranks - 1) : 0.0;
  Pieces pieces(weights.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    size_t next = 0;
    double soonest = std::numeric_limits<double>::infinity();
    for (size_t rank = 0; rank < weights.size(); ++rank) {
      const double missing =
          weights[rank] * static_cast<double>(i + 1) - static_cast<double>(pieces[rank].size());
      if (weights[rank] == 0.0 || missing < reserve) continue;
      // Rows until it would miss a whole one.
      const double until = (1 - reserve - missing) / weights[rank];
      if (until < soonest) {
        soonest = until;
        next = rank;
      }
    }
    pieces[next].push_back({rows[i].second, rows[i].second + 1});
  }
  for (auto& owned : pieces) owned = joined(std::move(owned));
  return pieces;
}

}  // namespace

Pieces packed_pieces(const VisiblePairs& pairs, int64_t world_size,
                     const std::vector<double>& weights) {
  const auto shares = normalised(weights, world_size);
  const auto targets = targets_of(pairs, shares);
  double most = 0.0;
  for (const Target& target : targets) most = std::max(most, target.pairs);

  Pieces best;
  int64_t least_cost = std::numeric_limits<int64_t>::max();
  const size_t num_runs = pairs.runs().size();
  for (const int64_t num_sections : kNumSections) {
    const auto runs = num_sections == 1 ? pairs.runs() : in_sections(pairs, most, num_sections);
    if (num_sections > 1 && (runs.size() == num_runs || num_runs * world_size > kMaxWork)) break;
    Pieces pieces = arcs_of(pairs, runs, targets, world_size);
    const int64_t cost = cost_of(pairs, pieces);
    if (cost >= least_cost || !balanced(pairs, targets, pieces)) continue;
    least_cost = cost;
    best = std::move(pieces);
  }
  // Whole rows are too coarse for arcs only in sequences of a few hundred tokens.
  return best.empty() ? dealt(pairs, shares) : best;
}

int64_t rows_fetched(const VisiblePairs& pairs, const std::vector<Segment>& pieces) {
  int64_t fetched = 0, seen = 0;
  for (const Segment& piece : pieces) {
    const Segment keys = pairs.keys_of(piece.begin, piece.end);
    fetched += keys.end - std::max(keys.begin, seen) - (piece.end - piece.begin);
    seen = keys.end;
  }
  return fetched;
}

}  // namespace ringattn
