// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/merge_states.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorAccessor.h>

#include <limits>

#include "core/lse_merge.h"

namespace ringattn::cpu {
namespace {

template <typename Real>
void merge(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& other_out,
           const at::Tensor& other_lse) {
  auto out_rows = out.accessor<Real, 4>();
  auto lse_rows = lse.accessor<Real, 3>();
  auto other_rows = other_out.accessor<Real, 4>();
  auto other_lse_rows = other_lse.accessor<Real, 3>();
  const int64_t queries = out.size(1), heads = out.size(2), dim = out.size(3);
  constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  constexpr int64_t kGrain = 256;  // rows that are worth a thread
  at::parallel_for(0, out.size(0) * queries * heads, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / (queries * heads), s = row / heads % queries, h = row % heads;
      const Real other = other_lse_rows[b][h][s];
      Real& mine = lse_rows[b][h][s];
      auto into = out_rows[b][s][h];
      const auto from = other_rows[b][s][h];
      // Note: an empty state's out is not multiplied by 0, which would keep a NaN in it.
      if (mine == kEmpty) {
        for (int64_t d = 0; d < dim; ++d) into[d] = other == kEmpty ? Real(0) : from[d];
        mine = other;
        continue;
      }
      if (other == kEmpty) continue;
      const auto weights = merge_weights(mine, other);
      for (int64_t d = 0; d < dim; ++d) into[d] = weights.a * into[d] + weights.b * from[d];
      mine = weights.lse;
    }
  });
}

}  // namespace

void merge_states_(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& other_out,
                   const at::Tensor& other_lse) {
  AT_DISPATCH_FLOATING_TYPES(out.scalar_type(), "merge_states_",
                             [&] { merge<scalar_t>(out, lse, other_out, other_lse); });
}

}  // namespace ringattn::cpu
