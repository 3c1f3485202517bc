// SPDX-License-Identifier: Apache-2.0
#include "attention/block_attention.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "ops/checks.h"

namespace ringattn {
namespace {

std::tuple<at::Tensor, at::Tensor> block_attention_op(const at::Tensor& q, const at::Tensor& k,
                                                      const at::Tensor& v, double scale,
                                                      std::optional<int64_t> diagonal) {
  check_attention(q, k, v, scale);
  const c10::DeviceGuard guard(q.device());
  return block_attention(q, k, v, scale, diagonal, q.scalar_type());
}

void fold_block_attention_op(at::Tensor& out, at::Tensor& lse, const at::Tensor& q,
                             const at::Tensor& k, const at::Tensor& v, double scale,
                             std::optional<int64_t> diagonal) {
  check_attention(q, k, v, scale);
  check_state(out, lse, q);
  const c10::DeviceGuard guard(q.device());
  AttentionResult result;
  result.state = out;
  result.lse = lse;
  result.fold = true;
  block_attention(q, k, v, scale, diagonal, result);
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) {
  m.impl("block_attention", &block_attention_op);
  m.impl("block_attention_", &fold_block_attention_op);
}

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) {
  m.impl("block_attention", &block_attention_op);
  m.impl("block_attention_", &fold_block_attention_op);
}
#endif

}  // namespace
}  // namespace ringattn
