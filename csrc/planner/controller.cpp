// SPDX-License-Identifier: Apache-2.0
#include "planner/controller.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace ringattn {
namespace {

// A deviation is large beyond 6 %, and beyond what the noise so far explains.
constexpr double kLarge = 0.06;
constexpr double kSigmas = 4.0;
constexpr double kChangeSigmas = 3.0;  // what a change adds to the noise at most
constexpr int64_t kMemory = 40;        // observations that a belief, or the noise, averages at most

constexpr size_t kFalls = 2;
constexpr int64_t kFallWindow = 4;  // requests
constexpr int64_t kPatience = 3;
constexpr double kAlong = 0.03;  // a deviation that is believed when another rank's is
constexpr int64_t kMaxPatience = 24;
constexpr int64_t kFlapWindow = 16;  // a fall within so many requests after a rise is flapping
constexpr int64_t kCalm = 48;        // after so many requests without a jump that is forgotten

// What a new plan has to gain: 2 %, and more than the beliefs are uncertain. After how many
// requests it may come without a jump, and what each that did adds to that gain: the first corrects
// what the profiles had wrong, those after it follow what goes up and down. A plan that has been
// calm for long has settled that.
constexpr double kGain = 0.02;
constexpr double kGainSigmas = 3.0;
constexpr int64_t kPause = 4;
constexpr double kGainPerCorrection = 0.01;

}  // namespace

void Controller::observe(const std::vector<std::optional<double>>& speeds) {
  if (speeds.size() != ranks_.size()) {
    throw std::invalid_argument("speeds must be " + std::to_string(ranks_.size()) +
                                ", one for each rank, got " + std::to_string(speeds.size()));
  }
  for (const auto& speed : speeds) {
    if (speed && !(*speed > 0.0 && std::isfinite(*speed))) {
      throw std::invalid_argument("speeds must be finite and positive, got " +
                                  std::to_string(*speed));
    }
  }
  std::vector<size_t> calm;
  const Rank* first = nullptr;  // that has jumped
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!speeds[rank]) continue;
    if (!update(ranks_[rank], *speeds[rank])) {
      calm.push_back(rank);
      continue;
    }
    if (first == nullptr) first = &ranks_[rank];
    jumped_ = true;
    failed_excess_ = 0.0;
    corrections_ = 0;
    ++jumps_;
  }
  if (first == nullptr) return;
  for (const size_t rank : calm) follow(ranks_[rank], *first);
}

std::vector<double> Controller::speeds() const {
  std::vector<double> speeds;
  for (const Rank& rank : ranks_) speeds.push_back(rank.speed);
  return speeds;
}

bool Controller::should_replan(double excess, int64_t slowest) {
  if (slowest < 0 || slowest >= static_cast<int64_t>(ranks_.size())) {
    throw std::invalid_argument("slowest must be one of the " + std::to_string(ranks_.size()) +
                                " ranks, got " + std::to_string(slowest));
  }
  if (++since_plan_ > kCalm) {
    failed_excess_ = 0.0;
    corrections_ = 0;
  }
  const Rank& rank = ranks_[slowest];
  const double uncertainty = std::sqrt(rank.variance / static_cast<double>(rank.observations));
  const double corrected = kGain + kGainPerCorrection * static_cast<double>(corrections_);
  const double least =
      failed_excess_ > 0.0 ? std::max(failed_excess_ + kGain, corrected) : corrected;
  const double gain = std::max(least, kGainSigmas * uncertainty);
  const bool replan = excess > gain && (jumped_ || since_plan_ >= kPause);
  if (replan) {
    since_plan_ = 0;
    if (!jumped_) ++corrections_;
  }
  jumped_ = false;
  return replan;
}

void Controller::record_failed_replan(double excess) { failed_excess_ = excess; }

bool Controller::update(Rank& rank, double seen) {
  ++rank.request;
  if (rank.request - rank.last_jump > kCalm) rank.patience = kPatience;
  const double deviation = seen / rank.speed - 1.0;
  const double sigma = std::sqrt(rank.variance);
  const double large = std::max(kLarge, kSigmas * sigma);
  // Noise is how much one observation differs from the last, so that a lasting change counts once;
  // and it is bounded, so that rare changes do not count as noise.
  if (!rank.seen.empty()) {
    const double bound = std::max(kLarge, kChangeSigmas * sigma);
    const double change = std::clamp(seen / rank.seen.back() - 1.0, -bound, bound);
    rank.variance += (change * change / 2 - rank.variance) /
                     static_cast<double>(std::min(rank.request, kMemory));
  }
  rank.seen.push_back(seen);
  if (static_cast<int64_t>(rank.seen.size()) > kPatience) rank.seen.erase(rank.seen.begin());
  if (std::abs(deviation) <= large) {
    rank.observations = std::min(rank.observations + 1, kMemory);
    rank.speed += rank.speed * deviation / static_cast<double>(rank.observations);
    rank.rises.clear();
    return false;
  }

  const bool rose = deviation > 0.0;
  double sum = 0.0;
  if (rose) {
    rank.rises.push_back(seen);
    if (static_cast<int64_t>(rank.rises.size()) < rank.patience) return false;
    sum = std::accumulate(rank.rises.end() - kPatience, rank.rises.end(), 0.0);
    rank.observations = kPatience;
  } else {
    rank.rises.clear();
    rank.falls.emplace_back(rank.request, seen);
    if (rank.falls.front().first <= rank.request - kFallWindow) {
      rank.falls.erase(rank.falls.begin());
    }
    if (rank.falls.size() < kFalls) return false;
    for (const auto& [request, speed] : rank.falls) sum += speed;
    rank.observations = static_cast<int64_t>(rank.falls.size());
    if (rank.rose && rank.request - rank.last_jump <= kFlapWindow) {
      rank.patience = std::min(2 * rank.patience, kMaxPatience);
    }
  }
  rank.speed = sum / static_cast<double>(rank.observations);
  rank.falls.clear();
  rank.rises.clear();
  rank.last_jump = rank.request;
  rank.rose = rose;
  return true;
}

void Controller::follow(Rank& rank, const Rank& first) {
  const int64_t count = std::min(first.observations, static_cast<int64_t>(rank.seen.size()));
  const double mean =
      std::accumulate(rank.seen.end() - count, rank.seen.end(), 0.0) / static_cast<double>(count);
  const double deviation = mean / rank.speed - 1.0;
  if (first.rose ? deviation < kAlong : deviation > -kAlong) return;
  rank.speed = mean;
  rank.observations = count;
  rank.falls.clear();
  rank.rises.clear();
}

}  // namespace ringattn
