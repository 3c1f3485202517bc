// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/export.h"

namespace ringattn {

/// Follows the speeds of ranks through noise, and decides when a new plan pays.
///
/// Small deviations are averaged. A large one changes the belief when it is observed again: a fall
/// after two in four requests, a rise after three in a row, because a rank with too many tokens
/// delays all others while one with too few only idles. A rank that falls soon after a rise flaps:
/// each time, its next rise has to last twice as long. When the belief about one rank jumps, the
/// beliefs about others follow what they showed in the same requests, if in the same direction:
/// clocks of all devices fall and rise together, and ranks that followed one by one would look
/// unequal in between.
///
/// Equal observations give equal decisions on every rank, bit for bit: nothing but additions,
/// multiplications, divisions, square roots and comparisons, which IEEE 754 rounds one way.
class RINGATTN_API Controller {
 public:
  explicit Controller(int64_t world_size) : ranks_(world_size) {}

  /// One request: each rank's speed in it, relative to its profile; absent for a rank without work.
  /// Throws std::invalid_argument for another number of ranks, and for speeds that are not finite
  /// and positive.
  void observe(const std::vector<std::optional<double>>& speeds);

  /// The believed speeds relative to the profiles, [W].
  std::vector<double> speeds() const;

  /// Called once after each request: whether to replace the plan in use. Under it all ranks wait
  /// for the rank `slowest`, and it takes `excess` longer than the best plan at the believed
  /// speeds: 0.02 is 2 %, the least that counts; 1 % more with each plan since a belief has jumped,
  /// until one has been in use for 48 requests. Throws std::invalid_argument for a rank that is
  /// none.
  bool should_replan(double excess, int64_t slowest);

  /// A plan that promised to be faster by `excess` was not, and has been given up: until a belief
  /// jumps, or for 48 requests, the next one has to promise 2 % more than that.
  void record_failed_replan(double excess);

  /// How often a belief has jumped: measurements before a jump do not apply after it.
  int64_t jumps() const { return jumps_; }

 private:
  struct Rank {
    double speed = 1.0;
    int64_t observations = 4;  // that `speed` is the mean of; the profile is worth so many
    double variance = 4e-4;    // of an observation, relative: (2 %)^2 until more is known
    std::vector<double> seen;  // the latest, oldest first
    std::vector<std::pair<int64_t, double>> falls;  // large ones: (request, speed)
    std::vector<double> rises;                      // large ones in a row
    int64_t patience = 3;                           // how many of those it takes
    int64_t request = 0;
    int64_t last_jump = 0;  // the request after which the belief jumped
    bool rose = false;      // and whether it rose
  };

  // Returns whether the belief has jumped.
  static bool update(Rank& rank, double seen);

  // Lets a rank follow one that has just jumped, where it moved in the same direction.
  static void follow(Rank& rank, const Rank& first);

  std::vector<Rank> ranks_;
  bool jumped_ = false;
  int64_t jumps_ = 0;
  double failed_excess_ = 0.0;  // excess
  int64_t corrections_ = 0;     // new plans without a jump, since the last jump
  int64_t since_plan_ = 0;      // requests
};

}  // namespace ringattn
