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
                 ", ", dtype_name(mine.scalar_type()), ", got ", dtype_name(other.scalar_type()));
  RINGATTN_CHECK(other.device() == mine.device(), name, " must be on the device of ", like, ", ",
                 mine.device(), ", got ", other.device());
}

void merge_states_op(at::Tensor& out, at::Tensor& lse, const at::Tensor& other_out,
                     const at::Tensor& other_lse) {
  check_state(out, lse);
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
