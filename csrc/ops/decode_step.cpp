// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "ops/checks.h"

#ifdef RINGATTN_WITH_CUDA
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>
#include <tuple>

#include "attention/tensor_params.h"
#include "decode_step/cuda/decode_step.h"
#endif

// The operators between the products of one decoded token: CUDA only, and without a gradient.

namespace ringattn {
#ifdef RINGATTN_WITH_CUDA
namespace {

void check_like(const at::Tensor& x, const char* name, const at::Tensor& first,
                const char* first_name) {
  RINGATTN_CHECK(x.scalar_type() == first.scalar_type(), name, " must have the dtype of ",
                 first_name, ", ", dtype_name(first.scalar_type()), ", got ",
                 dtype_name(x.scalar_type()));
  RINGATTN_CHECK(x.device() == first.device(), name, " must be on the device of ", first_name, ", ",
                 first.device(), ", got ", x.device());
}

constexpr size_t kVectorBytes = 16;  // that kernels read at a time

// Rows of whole vectors: [..., E] with E a multiple of 8, and a dtype that the kernels have.
void check_row(const at::Tensor& x, const char* name) {
  const auto dtype = x.scalar_type();
  RINGATTN_CHECK(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, name,
                 " must be torch.float16, torch.bfloat16 or torch.float32, got ",
                 dtype_name(dtype));
  RINGATTN_CHECK(x.dim() >= 1 && x.size(-1) % 8 == 0, name,
                 " must have rows of a multiple of 8 elements, got shape ", x.sizes());
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_op(const at::Tensor& given_x,
                                                   const at::Tensor& given_delta,
                                                   const at::Tensor& given_weight, double eps) {
  check_row(given_x, "x");
  check_like(given_delta, "delta", given_x, "x");
  check_like(given_weight, "weight", given_x, "x");
  RINGATTN_CHECK(given_delta.sizes() == given_x.sizes(), "delta must have the shape of x, ",
                 given_x.sizes(), ", got ", given_delta.sizes());
  RINGATTN_CHECK(given_weight.dim() == 1 && given_weight.size(0) == given_x.size(-1),
                 "weight must have shape [E], E = ", given_x.size(-1), ", got ",
                 given_weight.sizes());
  const c10::DeviceGuard guard(given_x.device());
  const at::Tensor x = aligned(given_x, kVectorBytes), delta = aligned(given_delta, kVectorBytes),
                   weight = aligned(given_weight, kVectorBytes);
  at::Tensor sum = at::empty_like(x), normed = at::empty_like(x);
  AddRmsNormParams params;
  params.x = x.const_data_ptr();
  params.delta = delta.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.sum = sum.mutable_data_ptr();
  params.normed = normed.mutable_data_ptr();
  params.width = static_cast<int32_t>(x.size(-1));
  params.rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
  params.eps = static_cast<float>(eps);
  params.dtype = data_type(x.scalar_type());
  check_launch(cuda::add_rms_norm(params, current_stream(x)), "add_rms_norm");
  return {sum, normed};
}

at::Tensor gated_silu_op(const at::Tensor& given) {
  check_row(given, "gate_up");
  RINGATTN_CHECK(given.size(-1) % 16 == 0, "gate_up must have rows of a multiple of 16 elements, ",
                 "got shape ", given.sizes());
  const c10::DeviceGuard guard(given.device());
  const at::Tensor gate_up = aligned(given, kVectorBytes);
  at::Tensor out =
      at::empty_like(gate_up.narrow(-1, 0, gate_up.size(-1) / 2), at::MemoryFormat::Contiguous);
  GatedSiluParams params;
  params.gate_up = gate_up.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.width = static_cast<int32_t>(out.size(-1));
  params.rows = out.size(-1) == 0 ? 0 : out.numel() / out.size(-1);
  params.dtype = data_type(out.scalar_type());
  check_launch(cuda::gated_silu(params, current_stream(out)), "gated_silu");
  return out;
}

at::Tensor rotate_into_cache_op(const at::Tensor& given, const at::Tensor& given_cos,
                                const at::Tensor& given_sin, at::Tensor& keys, at::Tensor& values,
                                const at::Tensor& slot) {
  RINGATTN_CHECK(keys.dim() == 4 && keys.size(3) > 0,
                 "keys must have shape [B, N, H_kv, D], D > 0, got ", keys.sizes());
  RINGATTN_CHECK(values.sizes() == keys.sizes(), "values must have the shape of keys, ",
                 keys.sizes(), ", got ", values.sizes());
  check_row(keys, "keys");
  check_like(values, "values", keys, "keys");
  check_like(given, "qkv", keys, "keys");
  const int64_t batch = keys.size(0), kv_heads = keys.size(2), head_dim = keys.size(3);
  const int64_t heads = given.dim() == 3 ? given.size(2) / head_dim - 2 * kv_heads : 0;
  RINGATTN_CHECK(given.dim() == 3 && given.size(0) == batch && given.size(1) == 1 && heads > 0 &&
                     given.size(2) == (heads + 2 * kv_heads) * head_dim,
                 "qkv must have shape [B, 1, (H + 2 H_kv) * D], B, H_kv and D those of keys, ",
                 keys.sizes(), ", got ", given.sizes());
  for (const at::Tensor* x : {&given_cos, &given_sin}) {
    RINGATTN_CHECK(x->scalar_type() == at::kFloat && x->numel() == head_dim,
                   "cos and sin must be torch.float32 of D elements, ", head_dim, ", got ",
                   dtype_name(x->scalar_type()), " of shape ", x->sizes());
  }
  RINGATTN_CHECK(slot.scalar_type() == at::kInt && slot.numel() == 1,
                 "slot must be torch.int32 of one element, got ", dtype_name(slot.scalar_type()),
                 " of shape ", slot.sizes());
  for (const at::Tensor* x : {&given_cos, &given_sin, &slot}) {
    RINGATTN_CHECK(x->device() == keys.device(), "cos, sin and slot must be on the device of keys,",
                   " ", keys.device(), ", got ", x->device());
  }
  RINGATTN_CHECK(keys.stride(3) == 1 && values.stride(3) == 1,
                 "keys and values must have rows of contiguous heads, got strides ", keys.strides(),
                 " and ", values.strides());
  const c10::DeviceGuard guard(keys.device());
  const at::Tensor qkv = given.contiguous(), cos = given_cos.contiguous(),
                   sin = given_sin.contiguous();
  at::Tensor q = at::empty({batch, 1, heads, head_dim}, qkv.options());
  RotateIntoCacheParams params;
  params.qkv = qkv.const_data_ptr();
  params.cos = cos.const_data_ptr<float>();
  params.sin = sin.const_data_ptr<float>();
  params.q = q.mutable_data_ptr();
  params.keys = strided(keys);
  params.values = strided(values);
  params.slot = slot.const_data_ptr<int32_t>();
  params.batch = static_cast<int32_t>(batch);
  params.capacity = static_cast<int32_t>(keys.size(1));
  params.num_heads = static_cast<int32_t>(heads);
  params.num_kv_heads = static_cast<int32_t>(kv_heads);
  params.head_dim = static_cast<int32_t>(head_dim);
  params.dtype = data_type(qkv.scalar_type());
  check_launch(cuda::rotate_into_cache(params, current_stream(qkv)), "rotate_into_cache");
  return q;
}

TORCH_LIBRARY_IMPL(ringattn, CUDA, m) {
  m.impl("add_rms_norm", &add_rms_norm_op);
  m.impl("gated_silu", &gated_silu_op);
  m.impl("rotate_into_cache", &rotate_into_cache_op);
}

}  // namespace
#endif
}  // namespace ringattn
