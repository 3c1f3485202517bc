// SPDX-License-Identifier: Apache-2.0
#include "ops/gradient_arguments.h"

#include <ATen/ops/empty.h>

#include "ops/checks.h"

namespace ringattn {
namespace {

void check_like(const at::Tensor& x, const char* name, const at::Tensor& other,
                const char* other_name) {
  RINGATTN_CHECK(x.sizes() == other.sizes(), name, " must have the shape of ", other_name, ", ",
                 other.sizes(), ", got ", x.sizes());
  RINGATTN_CHECK(x.scalar_type() == other.scalar_type(), name, " must have the dtype of ",
                 other_name, ", ", dtype_name(other.scalar_type()), ", got ",
                 dtype_name(x.scalar_type()));
  RINGATTN_CHECK(x.device() == other.device(), name, " must be on the device of ", other_name, ", ",
                 other.device(), ", got ", x.device());
}

}  // namespace

void check_gradients(const GradientArguments& given, const at::Tensor& q) {
  check_like(given.out, "out", q, "q");
  check_like(given.grad_out, "grad_out", q, "q");
  const auto state = state_dtype(q.scalar_type());
  RINGATTN_CHECK(given.lse.dim() == 3 && given.lse.size(0) == q.size(0) &&
                     given.lse.size(1) == q.size(2) && given.lse.size(2) == q.size(1),
                 "lse must have shape [B, H, S_q] of q ", q.sizes(), ", got ", given.lse.sizes());
  RINGATTN_CHECK(given.lse.scalar_type() == state, "lse must be ", dtype_name(state), ", got ",
                 dtype_name(given.lse.scalar_type()));
  RINGATTN_CHECK(given.lse.device() == q.device(), "lse must be on the device of q, ", q.device(),
                 ", got ", given.lse.device());
  if (given.grad_lse) check_like(*given.grad_lse, "grad_lse", given.lse, "lse");
}

RowGradients row_gradients(const GradientArguments& given) {
  return row_gradients(given.grad_out, given.grad_lse.value_or(at::Tensor()), given.out, given.lse);
}

at::Tensor gradient_of_sinks(const std::optional<at::Tensor>& sinks, const RowGradients& rows) {
  if (!sinks) return at::empty({0}, rows.lse.options());
  return sink_gradients(*sinks, rows.lse, rows.delta).to(sinks->scalar_type());
}

}  // namespace ringattn
