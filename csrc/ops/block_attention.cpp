// SPDX-License-Identifier: Apache-2.0
#include "attention/block_attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "attention/block_attention_backward.h"
#include "ops/checks.h"
#include "ops/gradient_arguments.h"

namespace ringattn {
namespace {

// [S_q, 2], contiguous and aligned as kernels read it. Neither column decreases: on CUDA the host
// cannot look.
at::Tensor check_key_ranges(const at::Tensor& key_ranges, const at::Tensor& q) {
  RINGATTN_CHECK(key_ranges.scalar_type() == at::kInt, "key_ranges must be torch.int32, got ",
                 dtype_name(key_ranges.scalar_type()));
  RINGATTN_CHECK(
      key_ranges.dim() == 2 && key_ranges.size(0) == q.size(1) && key_ranges.size(1) == 2,
      "key_ranges must have shape [S_q, 2], S_q = ", q.size(1), ", got ", key_ranges.sizes());
  RINGATTN_CHECK(key_ranges.device() == q.device(), "key_ranges must be on the device of q, ",
                 q.device(), ", got ", key_ranges.device());
  const at::Tensor table = aligned(key_ranges, 2 * sizeof(int32_t));
  if (!table.is_cpu()) return table;
  const int32_t* const bounds = table.const_data_ptr<int32_t>();
  for (int64_t i = 2; i < table.numel(); ++i) {
    RINGATTN_CHECK(bounds[i - 2] <= bounds[i], "columns of key_ranges must not decrease, got ",
                   bounds[i - 2], " before ", bounds[i], " in column ", i % 2);
  }
  return table;
}

KeyBlock key_block(const at::Tensor& k, const at::Tensor& v, std::optional<int64_t> diagonal) {
  KeyBlock block = {k, v};
  if (diagonal) block.diagonal = *diagonal;
  return block;
}

void check_arguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                     std::optional<int64_t> diagonal, const std::optional<at::Tensor>& key_ranges,
                     double softcap, const std::optional<at::Tensor>& sinks) {
  check_attention(q, k, v, scale);
  check_scoring(q, softcap, sinks);
  RINGATTN_CHECK(!diagonal || !key_ranges,
                 "diagonal must be left out where there are key_ranges, got ", *diagonal);
}

std::tuple<at::Tensor, at::Tensor> block_attention_op(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& v, double scale,
                                                      std::optional<int64_t> diagonal,
                                                      const std::optional<at::Tensor>& key_ranges,
                                                      double softcap,
                                                      const std::optional<at::Tensor>& sinks) {
  check_arguments(q, k, v, scale, diagonal, key_ranges, softcap, sinks);
  const c10::DeviceGuard guard(q.device());
  KeyBlock block = key_block(k, v, diagonal);
  if (key_ranges) block.key_ranges = check_key_ranges(*key_ranges, q);
  return block_attention(q, block, make_scoring(q, scale, softcap, sinks), q.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> block_attention_backward_op(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    double scale, std::optional<int64_t> diagonal, const std::optional<at::Tensor>& key_ranges,
    double softcap, const std::optional<at::Tensor>& sinks) {
  const GradientArguments given{grad_out, grad_lse, out, lse};
  check_arguments(q, k, v, scale, diagonal, key_ranges, softcap, sinks);
  check_gradients(given, q);
  const c10::DeviceGuard guard(q.device());
  KeyBlock block = key_block(k, v, diagonal);
  if (key_ranges) {
    block.query_ranges = transposed_ranges(check_key_ranges(*key_ranges, q), k.size(1));
  }
  const RowGradients rows = row_gradients(given);
  const at::Tensor dk = at::empty(k.sizes(), k.options()), dv = at::empty(v.sizes(), v.options());
  block_attention_backward(q, block, make_scoring(q, scale, softcap, sinks), rows, dk, dv);
  return {rows.dq.to(q.scalar_type()), dk, dv, gradient_of_sinks(sinks, rows)};
}

void fold_block_attention_op(at::Tensor& out, at::Tensor& lse, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, double scale,
                             std::optional<int64_t> diagonal, double softcap) {
  check_attention(q, k, v, scale);
  check_scoring(q, softcap, {});
  check_state(out, lse, q);
  const c10::DeviceGuard guard(q.device());
  AttentionResult result;
  result.state = out;
  result.lse = lse;
  result.fold = true;
  block_attention(q, {key_block(k, v, diagonal)}, make_scoring(q, scale, softcap, {}), result);
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) {
  m.impl("block_attention", &block_attention_op);
  m.impl("block_attention_backward", &block_attention_backward_op);
  m.impl("block_attention_", &fold_block_attention_op);
}

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) {
  m.impl("block_attention", &block_attention_op);
  m.impl("block_attention_backward", &block_attention_backward_op);
  m.impl("block_attention_", &fold_block_attention_op);
}
#endif

}  // namespace
}  // namespace ringattn
