// SPDX-License-Identifier: Apache-2.0
#include "planner/time_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "core/ceil_div.h"
#include "planner/ring_simulation.h"

namespace ringattn {
namespace {

/// Operations in a millisecond of one TFLOP/s.
constexpr double kFlopsPerMs = 1e9;

/// What a pass over a layer takes, in units of a forward pass (FlashAttention-2,
/// https://arxiv.org/abs/2307.08691, section 4.1). Backward moves each block, and its gradients.
struct Pass {
  double attention, linear, bytes;
};
constexpr Pass kForward = {1.0, 1.0, 1.0};
constexpr Pass kBackward = {2.5, 2.0, 1.0 + kGradientBytes};

std::vector<Pass> passes(const Workload& workload) {
  return workload.training ? std::vector{kForward, kBackward} : std::vector{kForward};
}

// The sum of (first + i * step) / divisor, rounded down, over `count` numbers i from 0 on.
int64_t sum_of_quotients(int64_t count, int64_t first, int64_t step, int64_t divisor) {
  if (count == 0) return 0;
  int64_t sum = count * (count - 1) / 2 * (step / divisor) + count * (first / divisor);
  step %= divisor;
  first %= divisor;
  const int64_t end = first + count * step;
  // By the inverse: for each quotient, the number of arguments that reach it.
  if (end >= divisor) sum += sum_of_quotients(end / divisor, end % divisor, divisor, step);
  return sum;
}

// The number of tiles of `visits`, weighted by their time. All visits are one launch, whose query
// tiles do not cross the row from which on later owners' blocks are visible.
double tiles_of(const std::vector<Visit>& visits, int64_t num_rows, const AttentionTile& tile) {
  int64_t split = 0;
  for (const Visit& visit : visits) split = std::max(split, visit.queries.begin);
  double count = 0.0;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, split}, std::pair{split, num_rows}}) {
    if (begin == end) continue;
    const int64_t others = ceil_div(end - begin, tile.rows) - 1;  // than the last tile of rows
    int64_t of_others = 0, of_last = 0;                           // tiles of keys
    for (const Visit& visit : visits) {
      if (!visit.visible() || visit.queries.begin > begin) continue;
      switch (visit.visibility) {
        case Visibility::kAll:
          of_others += others * ceil_div(visit.keys.size(), tile.keys);
          of_last += ceil_div(visit.keys.size(), tile.keys);
          break;
        case Visibility::kTriangle:
          // Each tile of rows sees keys up to its own end; the last one ends with the rows. Also
          // where a triangle is too small to hide a pair: the model masks keys in each of its
          // tiles.
          of_others +=
              sum_of_quotients(others, begin + tile.rows + tile.keys - 1, tile.rows, tile.keys);
          of_last += ceil_div(end, tile.keys);
          break;
        case Visibility::kSplit:
        case Visibility::kIntervals:
          throw std::logic_error(
              "the time model must count tiles of rectangles and triangles only");
      }
    }
    const int64_t last_rows = end - begin - others * tile.rows;
    const int parts = static_cast<int>(ceil_div(last_rows, tile.rows_per_warpgroup));
    count += static_cast<double>(of_others) +
             static_cast<double>(of_last * warpgroups_cost(parts)) /
                 warpgroups_cost(tile.rows / tile.rows_per_warpgroup) +
             static_cast<double>((others + 1) * tile.overhead_keys) / tile.keys;
  }
  return count;
}

// Keys that each row computes in vain whatever the lengths, and that are part of the measured
// speed: the overhead of tiles, and masked keys of the own block, those up to the last row of the
// row's tile, and from there up to the next tile of keys.
double keys_in_speed(const AttentionTile& tile, bool causal) {
  const int masked = causal ? tile.rows + tile.keys - std::gcd(tile.rows, tile.keys) : 0;
  return tile.overhead_keys + static_cast<double>(masked) / 2;
}

// Pairs that a rank computes in whole tiles, in the time of the kind of tiles that ends first.
double pairs_in_tiles(const std::vector<Visit>& visits, int64_t num_rows, bool causal,
                      const std::vector<AttentionTile>& tiles) {
  double time = std::numeric_limits<double>::infinity();
  for (const AttentionTile& tile : tiles) {
    time = std::min(time, tile.relative_cost * tiles_of(visits, num_rows, tile));
  }
  const AttentionTile& first = tiles.front();
  return time / first.relative_cost * first.rows * first.keys -
         static_cast<double>(num_rows) * keys_in_speed(first, causal);
}

}  // namespace

double RankTime::num_pairs(double before, double tokens) const {
  if (!visible) return tokens * (by_position ? before + tokens / 2 : keys);
  const auto of_rows = [&](double end) {
    const int64_t whole = static_cast<int64_t>(end);
    const double pairs = static_cast<double>(visible->before(whole));
    const double next = static_cast<double>(visible->before(whole + 1));
    return pairs + (end - static_cast<double>(whole)) * (next - pairs);
  };
  const double end = before + tokens;
  if (!in_halves) return of_rows(end) - of_rows(before);
  const double all = static_cast<double>(visible->seq_len());
  return of_rows(end / 2) - of_rows(before / 2) + of_rows(all - before / 2) -
         of_rows(all - end / 2);
}

double RankTime::time_ms(double before, double tokens) const {
  if (tokens == 0.0) return 0.0;
  return overhead_ms + tokens * token_ms + num_pairs(before, tokens) * pair_ms;
}

double RankTime::tokens_within(double before, double left, double unit, double limit_ms) const {
  const double room = std::min(static_cast<double>(max_tokens), left);
  if (time_ms(before, room) <= limit_ms) return room;
  int64_t low = 0, high = static_cast<int64_t>(room / unit) + 1;  // in units: within, not
  if (!visible && limit_ms > overhead_ms) {  // a closed form, to be rounded down
    const double budget = limit_ms - overhead_ms;
    const double slope = token_ms + pair_ms * (by_position ? before : keys);
    const double curve = by_position ? 2 * pair_ms * budget : 0.0;
    const double tokens = 2 * budget / (slope + std::sqrt(slope * slope + curve));
    const int64_t nearest = static_cast<int64_t>(tokens / unit + 0.5);
    low = std::max(low, nearest - 1);
    high = std::min(high, nearest + 1);
  }
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const bool within = time_ms(before, static_cast<double>(middle) * unit) <= limit_ms;
    (within ? low : high) = middle;
  }
  return static_cast<double>(low) * unit;
}

std::vector<double> smooth_ms(const Partition& partition, const std::vector<RankTime>& times) {
  std::vector<double> ms(times.size());
  int64_t before = 0;
  for (const int64_t rank : partition.order()) {
    ms[rank] = times[rank].time_ms(before, partition.length(rank));
    before += partition.length(rank);
  }
  return ms;
}

bool has_room(const std::vector<RankTime>& times, const std::vector<int64_t>& lengths) {
  for (size_t rank = 0; rank < times.size(); ++rank) {
    if (lengths[rank] > times[rank].max_tokens) return false;
  }
  return true;
}

double slowest(const std::vector<double>& ms) { return *std::max_element(ms.begin(), ms.end()); }

TimeModel::TimeModel(int64_t seq_len, Layout layout, std::vector<RankProfile> profiles,
                     const ModelCost& cost, const Workload& workload)
    : seq_len_(seq_len),
      layout_(layout),
      profiles_(std::move(profiles)),
      cost_(cost),
      workload_(workload),
      waits_for_gradients_(workload.training) {
  if (!workload.mask.is_plain()) {
    visible_ = std::make_shared<const VisiblePairs>(workload.mask, seq_len);
    // Tiles are counted where rectangles and triangles say what is visible.
    for (RankProfile& profile : profiles_) profile.tiles.clear();
  }
  for (const RankProfile& profile : profiles_) {
    RankTime time;
    time.overhead_ms = profile.overhead_ms;
    for (const Pass& pass : passes(workload)) {
      time.token_ms += pass.linear * cost.linear_flops / (profile.linear_tflops * kFlopsPerMs);
      time.pair_ms +=
          pass.attention * cost.attention_flops / (profile.attention_tflops * kFlopsPerMs);
    }
    time.keys = static_cast<double>(seq_len) / (workload.mask.causal ? 2 : 1);
    time.by_position = visible_ || (workload.mask.causal && layout == Layout::kContiguous);
    time.visible = visible_;
    time.in_halves = layout == Layout::kZigzag;
    time.max_tokens = profile.max_tokens.value_or(std::numeric_limits<int64_t>::max());
    ranks_.push_back(time);
  }
}

TimeModel TimeModel::without_latency() const {
  TimeModel model = *this;
  for (RankProfile& profile : model.profiles_) profile.link_latency_us = {};
  return model;
}

TimeModel TimeModel::for_lengths() const {
  TimeModel model = *this;
  model.waits_for_gradients_ = false;
  return model;
}

TimeModel TimeModel::without_rank(int64_t rank) const {
  TimeModel model = *this;
  model.ranks_[rank].max_tokens = 0;
  int64_t left = seq_len_;
  for (const RankTime& time : model.ranks_) left -= std::min(left, time.max_tokens);
  model.ranks_[rank].max_tokens = left;
  return model;
}

bool TimeModel::has_tiles() const {
  return std::any_of(profiles_.begin(), profiles_.end(),
                     [](const RankProfile& profile) { return !profile.tiles.empty(); });
}

bool TimeModel::may_wait(int64_t depth) const {
  const bool links = std::any_of(profiles_.begin(), profiles_.end(), [](const auto& profile) {
    return profile.link_gbps || profile.link_latency_us;
  });
  return world_size() > 1 && (links || waits_for_gradients_ || depth < world_size() - 1);
}

std::vector<double> TimeModel::step_ms(const Partition& partition, int64_t depth,
                                       double limit_ms) const {
  auto ms = smooth_ms(partition, ranks_);
  if (!has_tiles() && slowest(ms) >= limit_ms) return ms;
  const bool waits = may_wait(depth);
  double attention = 0.0;
  for (const Pass& pass : passes(workload_)) attention += pass.attention;
  Schedules visits_of(ms.size());
  std::vector<double> pair_ms(ms.size(), 0.0);  // [W]: attention in a forward pass, by pair
  for (int64_t rank = 0; rank < world_size(); ++rank) {
    const std::vector<AttentionTile>& tiles = profiles_[rank].tiles;
    if (waits || !tiles.empty()) visits_of[rank] = schedule(partition, rank, mask());
    const int64_t tokens = partition.length(rank);
    if (tokens == 0) continue;
    const RankTime& time = ranks_[rank];
    const double rest = time.overhead_ms + static_cast<double>(tokens) * time.token_ms;
    if (visible_) {
      int64_t pairs = 0;
      for (const Segment& piece : partition.segments(rank)) {
        pairs += visible_->before(piece.end) - visible_->before(piece.begin);
      }
      ms[rank] = rest + static_cast<double>(pairs) * time.pair_ms;
    } else if (!tiles.empty()) {
      const double pairs = pairs_in_tiles(visits_of[rank], tokens, mask().causal, tiles);
      ms[rank] = rest + pairs * time.pair_ms;
    }
    if (ms[rank] >= limit_ms) return ms;
    int64_t pairs = 0;
    for (const Visit& visit : visits_of[rank]) pairs += visit.num_pairs;
    if (pairs > 0) pair_ms[rank] = (ms[rank] - rest) / attention / static_cast<double>(pairs);
  }
  if (!waits) return ms;
  const auto transfer = [&](double bytes) {
    return [&, bytes](int64_t rank, const Visit& visit) {
      const double tokens = bytes * static_cast<double>(visit.keys.size());
      return std::max(link_ms(visit.source, tokens), link_ms(rank, tokens));
    };
  };
  for (const Pass& pass : passes(workload_)) {
    const auto attend = [&](int64_t rank, const Visit& visit) {
      return pass.attention * pair_ms[rank] * static_cast<double>(visit.num_pairs);
    };
    const bool returns = waits_for_gradients_ && pass.bytes > 1.0;
    const auto waits = returns ? simulate_backward_waits(visits_of, attend, transfer(1.0),
                                                         transfer(kGradientBytes))
                               : simulate_waits(visits_of, attend, transfer(pass.bytes), depth);
    for (size_t rank = 0; rank < ms.size(); ++rank) ms[rank] += waits[rank];
  }
  return ms;
}

double TimeModel::link_ms(int64_t rank, double tokens) const {
  const RankProfile& profile = profiles_[rank];
  const double bytes = tokens * static_cast<double>(cost_.kv_bytes);
  return profile.link_latency_us.value_or(0.0) / 1e3 +
         (profile.link_gbps ? bytes / (*profile.link_gbps * 1e6) : 0.0);
}

}  // namespace ringattn
