// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"
#include "partition/visible_pairs.h"

namespace ringattn {

/// [W]: the pieces of each rank, ascending, neighbours joined, none empty.
using Pieces = std::vector<std::vector<Segment>>;

/// Pieces of packed documents that are balanced in tokens and in visible pairs.
///
/// Tokens of a rank follow its weight within one token; of equal ranks they differ by at most one.
/// Visible pairs of a rank exceed its weight's share by at most kPairTolerance of the share, or by
/// the longest row's pairs where that is more. Among such pieces, those are preferred whose ranks
/// fetch fewer rows.
///
/// `weights` [W], empty: equal ranks. A rank of weight 0 gets no tokens. Deterministic. Throws
/// std::invalid_argument for no ranks, weights that are negative, not finite, all 0, or not W.
RINGATTN_API Pieces packed_pieces(const VisiblePairs& pairs, int64_t world_size,
                                  const std::vector<double>& weights = {});

inline constexpr double kPairTolerance = 0.02;

/// Positions that some row of `pieces` sees and that are not in `pieces`, which ascend.
RINGATTN_API int64_t rows_fetched(const VisiblePairs& pairs, const std::vector<Segment>& pieces);

}  // namespace ringattn
