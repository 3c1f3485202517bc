// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "attention/attention_call.h"

namespace ringattn::testing {

/// Attention as it is written in a book, over the pairs for which sees(i, j): float64, one loop for
/// each index. out [B, S_q, H, D], lse [B, H, S_q].
template <typename Sees>
std::pair<at::Tensor, at::Tensor> reference_masked_attention(const at::Tensor& q,
                                                             const at::Tensor& k,
                                                             const at::Tensor& v,
                                                             const Scoring& scoring,
                                                             const Sees& sees) {
  const at::Tensor wide_q = q.to(at::kCPU, at::kDouble), wide_k = k.to(at::kCPU, at::kDouble),
                   wide_v = v.to(at::kCPU, at::kDouble);
  at::Tensor out = at::zeros(wide_q.sizes(), at::kDouble);
  at::Tensor lse = at::full({q.size(0), q.size(2), q.size(1)},
                            -std::numeric_limits<double>::infinity(), at::kDouble);
  const auto queries = wide_q.accessor<double, 4>(), keys = wide_k.accessor<double, 4>(),
             values = wide_v.accessor<double, 4>();
  auto outs = out.accessor<double, 4>();
  auto lses = lse.accessor<double, 3>();
  const int64_t group = q.size(2) / k.size(2), dim = q.size(3);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t h = 0; h < q.size(2); ++h) {
      for (int64_t i = 0; i < q.size(1); ++i) {
        // Scores of unit-normal inputs are small: no maximum is needed in float64.
        double sum = scoring.sinks.defined() ? std::exp(scoring.sinks[h].item<double>()) : 0.0;
        for (int64_t j = 0; j < k.size(1); ++j) {
          if (!sees(i, j)) continue;
          double score = 0.0;
          for (int64_t d = 0; d < dim; ++d) score += queries[b][i][h][d] * keys[b][j][h / group][d];
          score *= scoring.scale;
          if (scoring.softcap != 0.0) score = scoring.softcap * std::tanh(score / scoring.softcap);
          const double weight = std::exp(score);
          sum += weight;
          for (int64_t d = 0; d < dim; ++d) outs[b][i][h][d] += weight * values[b][j][h / group][d];
        }
        if (sum == 0.0) continue;
        for (int64_t d = 0; d < dim; ++d) outs[b][i][h][d] /= sum;
        lses[b][h][i] = std::log(sum);
      }
    }
  }
  return {out, lse};
}

inline std::pair<at::Tensor, at::Tensor> reference_attention(const at::Tensor& q,
                                                             const at::Tensor& k,
                                                             const at::Tensor& v, double scale,
                                                             std::optional<int64_t> diagonal) {
  return reference_masked_attention(
      q, k, v, scale, [&](int64_t i, int64_t j) { return !diagonal || j - i <= *diagonal; });
}

/// Keys under a diagonal as in torch.tril; none: no mask.
inline KeyBlock key_block(const at::Tensor& k, const at::Tensor& v,
                          std::optional<int64_t> diagonal = {}) {
  return {k, v, /*first_query=*/0, diagonal.value_or(KeyBlock::kNoMask)};
}

/// Largest difference; where one is infinite the other must be too.
inline double max_error(const at::Tensor& result, const at::Tensor& expected) {
  if (result.numel() == 0) return 0.0;
  const at::Tensor mine = result.to(at::kCPU, at::kDouble),
                   theirs = expected.to(at::kCPU, at::kDouble);
  const at::Tensor same = mine.eq(theirs);  // covers -inf on both sides
  return at::where(same, at::zeros_like(mine), (mine - theirs).abs()).max().item<double>();
}

}  // namespace ringattn::testing
