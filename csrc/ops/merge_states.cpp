// SPDX-License-Identifier: Apache-2.0
#include "attention/merge_states.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ops/checks.h"

namespace ringattn {
namespace {

void check_same(const at::Tensor& other, const at::Tensor& mine, const char* name,
                const char* like) {
  RINGATTN_CHECK(other.sizes() == mine.sizes(), name, " must have the shape of ", like, ", ",
                 mine.sizes(), ", got ", other.sizes());
  RINGATTN_CHECK(other.scalar_type() == mine.scalar_type(), name, " must have the dtype of ", like,
                 ", ", mine.scalar_type(), ", got ", other.scalar_type());
  RINGATTN_CHECK(other.device() == mine.device(), name, " must be on the device of ", like, ", ",
                 mine.device(), ", got ", other.device());
}

void merge_states_op(at::Tensor& out, at::Tensor& lse, const at::Tensor& other_out,
                     const at::Tensor& other_lse) {
  RINGATTN_CHECK(out.dim() == 4, "out must have 4 dimensions [B, S, H, D], got ", out.dim());
  const auto dtype = out.scalar_type();
  RINGATTN_CHECK(dtype == at::kFloat || (out.is_cpu() && dtype == at::kDouble),
                 "out must be a float32 state", out.is_cpu() ? ", or float64" : "", ", got ",
                 dtype);
  const std::vector<int64_t> rows = {out.size(0), out.size(2), out.size(1)};
  RINGATTN_CHECK(lse.sizes() == at::IntArrayRef(rows), "lse must have shape [B, H, S], ",
                 at::IntArrayRef(rows), ", got ", lse.sizes());
  RINGATTN_CHECK(lse.scalar_type() == dtype && lse.device() == out.device(),
                 "lse must have the dtype and the device of out, ", dtype, " on ", out.device(),
                 ", got ", lse.scalar_type(), " on ", lse.device());
  check_same(other_out, out, "other_out", "out");
  check_same(other_lse, lse, "other_lse", "lse");
  const c10::DeviceGuard guard(out.device());
  merge_states_(out, lse, other_out, other_lse);
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("merge_states_", &merge_states_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("merge_states_", &merge_states_op); }
#endif

}  // namespace
}  // namespace ringattn
