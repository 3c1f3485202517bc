// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "partition/partition.h"
#include "partition/schedule.h"
#include "partition/visible_pairs.h"
#include "planner/profile.h"

// The only model of the time of a layer on unequal ranks: work, padding of attention tiles, and
// waits for blocks and, in training, for gradients.

namespace ringattn {

/// The work of one rank as a function of the tokens that it owns, without padding and waits.
struct RankTime {
  double overhead_ms = 0.0;  // for a rank with tokens
  double token_ms = 0.0;     // for each token
  double pair_ms = 0.0;      // for each pair of a query and a key that it sees
  // Under a plain mask: keys that a token sees on average, wherever it stands. Where `by_position`,
  // a token sees those before it instead.
  double keys = 0.0;
  bool by_position = false;
  std::shared_ptr<const VisiblePairs> visible;  // under another mask; `by_position` then
  bool in_halves = false;                       // of it: the layout is zigzag
  int64_t max_tokens = 0;

  /// Visible pairs of `tokens` tokens after `before` others, in the order in which ranks own them
  /// (zigzag: half of them from each end of the sequence).
  double num_pairs(double before, double tokens) const;

  /// The time of `tokens` tokens after `before` others.
  double time_ms(double before, double tokens) const;

  /// The largest part of `left` tokens that takes at most `limit_ms`: all that fit the rank, or a
  /// multiple of `unit`.
  double tokens_within(double before, double left, double unit, double limit_ms) const;
};

/// [W]: the time of each rank without padding and waits.
std::vector<double> smooth_ms(const Partition& partition, const std::vector<RankTime>& times);

bool has_room(const std::vector<RankTime>& times, const std::vector<int64_t>& lengths);

double slowest(const std::vector<double>& ms);

/// The times that partitions of one sequence in one layout take on these ranks.
class TimeModel {
 public:
  static constexpr double kUnlimited = std::numeric_limits<double>::infinity();

  TimeModel(int64_t seq_len, Layout layout, std::vector<RankProfile> profiles,
            const ModelCost& cost, const Workload& workload);

  /// The model without the latency of links: a single hop, which is what is measured, has more of
  /// it than a block that follows others.
  TimeModel without_latency() const;
  /// The model by which lengths are chosen: no rank waits for one that computes gradients, which
  /// travel with the blocks.
  TimeModel for_lengths() const;
  /// The model in which `rank` owns only those tokens for which the others have no room.
  TimeModel without_rank(int64_t rank) const;

  int64_t seq_len() const { return seq_len_; }
  int64_t world_size() const { return static_cast<int64_t>(ranks_.size()); }
  Layout layout() const { return layout_; }
  const std::vector<RankProfile>& profiles() const { return profiles_; }
  const Mask& mask() const { return workload_.mask; }
  bool training() const { return workload_.training; }
  /// [W]
  const std::vector<RankTime>& ranks() const { return ranks_; }
  /// Whether times depend on the tokens before a rank's own: those of all ranks or of none do.
  bool by_position() const { return ranks_[0].by_position; }
  /// Whether attention kernels of any rank compute whole tiles that are counted: those of plain
  /// masks.
  bool has_tiles() const;
  /// Whether a rank may wait for another.
  bool may_wait(int64_t depth) const;

  /// [W]: the time of each rank, with `depth` blocks in flight, in a backward all. Rows of each of
  /// its segments, and visible keys of each block, are rounded up to the tiles of
  /// `RankProfile::tiles` with the least total time. Attention hides transfers, matrix products do
  /// not. Ends at a rank whose work takes `limit_ms`, without waits: ranks after it lack padding.
  std::vector<double> step_ms(const Partition& partition, int64_t depth,
                              double limit_ms = kUnlimited) const;

  /// The time of a block of `tokens` tokens over the links of `rank`.
  double link_ms(int64_t rank, double tokens) const;

 private:
  int64_t seq_len_;
  Layout layout_;
  std::vector<RankProfile> profiles_;  // [W]
  ModelCost cost_;
  Workload workload_;
  bool waits_for_gradients_;
  std::shared_ptr<const VisiblePairs> visible_;  // null under a plain mask
  std::vector<RankTime> ranks_;                  // [W]
};

}  // namespace ringattn
