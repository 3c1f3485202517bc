// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/export.h"
#include "partition/partition.h"
#include "planner/profile.h"

// How many tokens each of unequal ranks should own, the order in which they attend blocks, and how
// many blocks should be in flight ahead.

namespace ringattn {

struct Plan {
  Partition partition;
  int64_t depth = 1;                  // blocks in flight ahead of the one being attended
  int64_t min_depth = 1;              // the least depth with which no rank waits longer
  std::vector<double> rank_ms;        // [W], predicted, waits included
  double ideal_ms = 0.0;              // without overheads, memory limits and rounding
  std::vector<int64_t> memory_bytes;  // [W], of a ring call: buffers of blocks and gradients
};

/// [W]: milliseconds that each rank takes for a layer, by `TimeModel`: overhead + tokens x time per
/// token, which includes causal attention to half the sequence (zigzag) or to the preceding tokens
/// (contiguous); the padding of attention tiles; and waits for blocks, with `depth` of them in
/// flight (absent: all), and in training for gradients.
RINGATTN_API std::vector<double> predict(const Partition& partition,
                                         const std::vector<RankProfile>& profiles,
                                         const ModelCost& cost, const Workload& workload,
                                         std::optional<int64_t> depth = std::nullopt);

/// The partition whose slowest rank is fastest, by `predict`.
///
/// Where no rank waits for blocks, no other partition into whole tokens is faster by more than 0.5
/// %, and none at all below 4096 tokens a rank: long sequences are divided in units of 16, 64 or
/// 256 tokens. Up to 8 ranks this holds over all orders of a contiguous partition, above them for
/// the order from fast to slow.
///
/// Where kernels compute whole tiles (`RankProfile::tiles`), lengths that fill them are taken
/// instead if they are faster (than even ones: by a hundredth). For three ranks with ten tiles each
/// the result is within a percent of the best, with a few tiles only nearly so (`improve_lengths`).
///
/// Where ranks may wait, for the bandwidth of links (their latency is only predicted, and moves no
/// tokens) or for want of depth, the sequence is planned without the k ranks with the slowest links
/// and without the k slowest ranks, for every k, and tokens move between ranks while that helps.
/// For two or three ranks the result is the best in most cases, for more ranks without a bound.
///
/// In training ranks wait for gradients that others compute, also without links. Lengths are those
/// of the work and the bytes of a step.
///
/// The even partition is taken wherever it is as fast, and kept for equal ranks that wait, or whose
/// tiles it does not fill, unless another is a tenth faster.
///
/// `layout` absent: zigzag under a plain mask; contiguous where documents are packed, of which only
/// those that lie across a cut travel then; under a window alone the faster of the two, and where
/// they are equally fast contiguous, whose ranks fetch half as many rows, unless one of them owns a
/// tenth more tokens than any under zigzag.
///
/// Under a mask that is not plain, pairs are counted as visible, and tiles are not.
///
/// `depth` absent: W - 1, with which no rank waits for one that computes. The least depth that
/// would do for these lengths is what `predict` finds as fast; of orders that cost nothing
/// (zigzag), the one is taken that makes it least.
///
/// Throws std::invalid_argument for no profiles, a negative length, limits that do not hold the
/// sequence, a depth below 1.
RINGATTN_API Plan plan(int64_t seq_len, const std::vector<RankProfile>& profiles,
                       const ModelCost& cost, std::optional<Layout> layout,
                       const Workload& workload, std::optional<int64_t> depth);

/// How many of `num_tokens` cached keys each rank should hold, so that the slowest has read its own
/// soonest: in proportion to memory_gbps, within max_tokens; evenly where that is as fast or where
/// no bandwidth is known. Throws std::invalid_argument as `plan`, and for bandwidths known of some
/// ranks only.
RINGATTN_API std::vector<int64_t> plan_cache(int64_t num_tokens,
                                             const std::vector<RankProfile>& profiles,
                                             const ModelCost& cost);

}  // namespace ringattn
