// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "segment_lists.h"
#include "side_stream.h"

// Launches that fetch the keys of their list from peers, on one device.

namespace ringattn::testing {

/// Makes all segments but the first remote: fetched into memory that holds NaN, from blocks with
/// more rows than are visible, NaN too. With `gaps` such rows lie between those of every other one.
/// Segments behind others are local ones of what these fetch.
class Remote {
 public:
  explicit Remote(Problem& problem, std::mt19937* gaps = nullptr) {
    for (size_t i = 1; i < problem.segments.size(); ++i) {
      Segment& segment = problem.segments[i];
      Segment* const behind = segment.keys_behind > 0 ? &problem.segments[i + 1] : nullptr;
      at::Tensor k = segment.k, v = segment.v;
      if (behind != nullptr) {
        k = at::cat({k, behind->k}, 1);
        v = at::cat({v, behind->v}, 1);
      }
      const at::Tensor planes = at::stack({k, v}).permute({3, 0, 1, 2, 4});  // [H_kv, 2, B, S_k, D]
      segment.source = at::constant_pad_nd(planes, {0, 0, 0, 5}, kNaN).contiguous();
      if (gaps != nullptr && i % 2 == 1) lay_apart(planes, *gaps, segment);
      sources_.push_back(segment.source);
      to_.push_back(at::empty_like(planes, planes.options(), at::MemoryFormat::Contiguous));
      const int64_t own = segment.k.size(1);
      const auto fetched = [&](int64_t plane, int64_t first, int64_t rows) {
        return to_.back().select(1, plane).permute({1, 2, 0, 3}).narrow(1, first, rows);
      };
      segment.k = fetched(0, 0, own);
      segment.v = fetched(1, 0, own);
      if (behind == nullptr) continue;
      behind->k = fetched(0, own, segment.keys_behind);
      behind->v = fetched(1, own, segment.keys_behind);
      ++i;
    }
  }

  void forget() const {
    for (const at::Tensor& to : to_) to.fill_(kNaN);
  }
  /// Replaces a head of all sources by NaN and returns it in host memory, from where a copy engine
  /// restores it while a launch occupies every multiprocessor.
  std::vector<at::Tensor> take_away(int64_t head) const {
    std::vector<at::Tensor> taken;
    for (const at::Tensor& source : sources_) {
      taken.push_back(source[head].cpu());
      source[head].fill_(kNaN);
    }
    return taken;
  }
  void give_back(int64_t head, const std::vector<at::Tensor>& taken, const SideStream& side) const {
    for (size_t i = 0; i < taken.size(); ++i) side.copy(sources_[i][head], taken[i]);
  }

  bool nothing_arrived() const {
    return std::all_of(to_.begin(), to_.end(),
                       [](const at::Tensor& to) { return to.isnan().all().item<bool>(); });
  }

 private:
  static void lay_apart(const at::Tensor& planes, std::mt19937& random, Segment& segment) {
    std::vector<int32_t> parts;
    std::vector<at::Tensor> rows;
    const int64_t num_keys = planes.size(3);
    for (int64_t from = 0, to = 0; to < num_keys;) {
      const int64_t count = std::min<int64_t>(1 + random() % 128, num_keys - to);
      const int64_t gap = random() % 40;
      for (const int64_t number : {from, to, count, int64_t{0}}) {
        parts.push_back(static_cast<int32_t>(number));
      }
      rows.push_back(at::constant_pad_nd(planes.narrow(3, to, count), {0, 0, 0, gap}, kNaN));
      from += count + gap;
      to += count;
    }
    segment.source = at::cat(rows, 3).contiguous();
    segment.parts = at::tensor(parts, at::kInt).view({-1, 4}).to(planes.device());
  }

  std::vector<at::Tensor> sources_, to_;
};

/// The signals at the begin of the next call: peers have staged everything, none has a read signal.
inline void stage_again(const Problem& problem, const Launch& launch) {
  launch.signals[kStaged].fill_(static_cast<int>(ringattn::staged_heads(problem.heads().kv)));
  launch.signals[kStagedMirrorByPeer].fill_(77);  // a tag
  for (const int read : {kReadByThisRank, kReadMirrorByThisRank}) launch.signals[read].fill_(0);
}

/// A launch that fetches keys of `num_peers` peers.
inline Launch fetching_launch(const Problem& problem, int64_t num_peers, int64_t room) {
  Launch launch;
  launch.scratch = zero_scratch(room);
  launch.failed = at::zeros({1}, launch.scratch.options());
  launch.given_up = at::zeros({1}, at::TensorOptions(at::kInt).pinned_memory(true));
  launch.signals = at::zeros({kNumSignals, num_peers}, launch.scratch.options());
  launch.signals[kReadByPeer].fill_(1);
  stage_again(problem, launch);
  return launch;
}

}  // namespace ringattn::testing
