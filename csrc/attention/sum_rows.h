// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "core/export.h"
#include "core/hop_plan.h"

namespace ringattn {

/// Of some rows of a sum: x [2, B, rows.size(), H_kv, D], rows of it contiguous.
struct RowsToAdd {
  at::Tensor x;
  RowRange rows;
};

/// sum [2, B, S, H_kv, D], state dtype, contiguous, plus all parts in their order, rounded once to
/// `out`: two of [B, S, H_kv, D], contiguous, perhaps the memory of `sum` itself. Uses up `sum`.
RINGATTN_API void sum_rows(const at::Tensor& sum, const std::vector<RowsToAdd>& parts,
                           const std::array<at::Tensor, 2>& out);

}  // namespace ringattn
