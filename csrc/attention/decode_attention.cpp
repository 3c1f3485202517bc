// SPDX-License-Identifier: Apache-2.0
#include "attention/decode_attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "attention/block_attention.h"
#include "attention/cpu/block_attention.h"
#include "attention/merge_states.h"

#ifdef RINGATTN_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>

#include "attention/cuda/decode_attention.h"
#include "attention/cuda/exchange_partials.h"
#include "attention/tensor_params.h"
#endif

namespace ringattn {
namespace {

int64_t partial_floats(const at::Tensor& q) { return q.numel() + q.numel() / q.size(3); }

// The two halves of a partial: out [..., B, T, H, D] and lse [..., B, H, T].
std::pair<at::Tensor, at::Tensor> split(const at::Tensor& partials, const at::Tensor& q) {
  const int64_t states = partials.numel() / partial_floats(q);
  const at::Tensor rows = partials.view({states, -1});
  return {rows.narrow(1, 0, q.numel()).view({states, q.size(0), q.size(1), q.size(2), q.size(3)}),
          rows.narrow(1, q.numel(), q.numel() / q.size(3))
              .view({states, q.size(0), q.size(2), q.size(1)})};
}

#ifdef RINGATTN_WITH_CUDA
// Into out [B, T, H, D], of q's dtype or float32, and lse [B, H, T], both contiguous.
void decode_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                 const DecodeMask& mask, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor queries = as_kernel_input(q), keys = as_kernel_input(k),
                   values = as_kernel_input(v);
  DecodeAttentionParams params;
  static_cast<AttentionShape&>(params) = attention_shape(q, k.size(2), scale);
  params.q = strided(queries);
  params.k = strided(keys);
  params.v = strided(values);
  const auto contiguous = [](const std::optional<at::Tensor>& x) {
    return x ? x->contiguous() : at::Tensor();
  };
  const at::Tensor lengths = contiguous(mask.key_lengths), begins = contiguous(mask.key_begins);
  if (lengths.defined()) params.key_lengths = lengths.const_data_ptr<int32_t>();
  if (begins.defined()) params.key_begins = begins.const_data_ptr<int32_t>();
  const at::Tensor sinks = mask.sinks ? mask.sinks->to(at::kFloat).contiguous() : at::Tensor();
  if (sinks.defined()) params.sinks = sinks.const_data_ptr<float>();
  params.softcap = static_cast<float>(mask.softcap);
  params.out = out.mutable_data_ptr();
  params.out_dtype = data_type(out.scalar_type());
  params.lse = lse.data_ptr<float>();
  params.num_keys = k.size(1);
  const int num_sms = at::cuda::getDeviceProperties(q.device().index())->multiProcessorCount;
  const at::Tensor workspace =
      at::empty({cuda::decode_workspace_floats(params, num_sms)}, lse.options());
  params.workspace = workspace.data_ptr<float>();
  check_launch(cuda::decode_attention(params, current_stream(q)), "decode_attention");
}
#endif

}  // namespace

at::Tensor decode_partial(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, const DecodeMask& mask) {
  const auto wide = q.options().dtype(state_dtype(q.scalar_type()));
  at::Tensor partial = at::empty({partial_floats(q)}, wide);
  if (q.numel() == 0) return partial;
  const auto [outs, lses] = split(partial, q);
  const at::Tensor out = outs.select(0, 0), lse = lses.select(0, 0);
#ifdef RINGATTN_WITH_CUDA
  if (q.is_cuda()) {
    decode_cuda(q, k, v, scale, mask, out, lse);
    return partial;
  }
#endif
  Scoring scoring(scale);
  scoring.softcap = mask.softcap;
  if (mask.sinks) scoring.sinks = mask.sinks->to(lse.scalar_type());
  const auto attend = [&](int64_t first_row, int64_t num_rows, int64_t begin, int64_t end) {
    const auto rows = [&](const at::Tensor& x) { return x.narrow(0, first_row, num_rows); };
    AttentionResult result;
    result.state = rows(out);
    result.lse = rows(lse);
    block_attention(
        rows(q), {{rows(k).narrow(1, begin, end - begin), rows(v).narrow(1, begin, end - begin)}},
        scoring, result);
    cpu::add_sinks({result.state, result.lse}, scoring);
  };
  if (!mask.key_lengths && !mask.key_begins) {
    attend(0, q.size(0), 0, k.size(1));
    return partial;
  }
  const auto bound = [](const std::optional<at::Tensor>& bounds, int64_t row, int64_t otherwise) {
    return bounds ? (*bounds)[row].item<int64_t>() : otherwise;
  };
  for (int64_t row = 0; row < q.size(0); ++row) {
    const int64_t end = std::clamp<int64_t>(bound(mask.key_lengths, row, k.size(1)), 0, k.size(1));
    attend(row, 1, std::clamp<int64_t>(bound(mask.key_begins, row, 0), 0, end), end);
  }
  return partial;
}

std::pair<at::Tensor, at::Tensor> decode_alone(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v, double scale,
                                               const DecodeMask& mask, at::ScalarType dtype) {
#ifdef RINGATTN_WITH_CUDA
  if (q.is_cuda() && q.numel() > 0) {
    at::Tensor out = at::empty(q.sizes(), q.options().dtype(dtype));
    at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)},
                               q.options().dtype(state_dtype(q.scalar_type())));
    decode_cuda(q, k, v, scale, mask, out, lse);
    return {out, lse};
  }
#endif
  return merge_partials(decode_partial(q, k, v, scale, mask), q, dtype);
}

std::pair<at::Tensor, at::Tensor> merge_partials(const at::Tensor& partials, const at::Tensor& q,
                                                 at::ScalarType dtype) {
  if (q.numel() == 0) {
    return {at::empty(q.sizes(), q.options().dtype(dtype)),
            at::empty({q.size(0), q.size(2), q.size(1)}, partials.options())};
  }
  const auto [outs, lses] = split(partials, q);
  return merge_all_states(outs, lses, dtype);
}

int64_t partial_bytes(const at::Tensor& q) {
  return partial_floats(q) * static_cast<int64_t>(at::elementSize(state_dtype(q.scalar_type())));
}

std::pair<at::Tensor, at::Tensor> exchange_partials(const at::Tensor& partial, const at::Tensor& q,
                                                    at::ScalarType dtype,
                                                    const PartialExchange& exchange) {
#ifdef RINGATTN_WITH_CUDA
  const at::Tensor out = at::empty(q.sizes(), q.options().dtype(dtype));
  const at::Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)}, partial.options());
  cuda::ExchangePartialsParams params;
  params.exchange = exchange;
  params.partial = partial.data_ptr<float>();
  params.out = out.data_ptr();
  params.lse = lse.data_ptr<float>();
  params.batch = static_cast<int32_t>(q.size(0));
  params.num_queries = static_cast<int32_t>(q.size(1));
  params.num_heads = static_cast<int32_t>(q.size(2));
  params.head_dim = static_cast<int32_t>(q.size(3));
  params.out_dtype = data_type(dtype);
  check_launch(cuda::exchange_partials(params, current_stream(q)), "exchange_partials");
  return {out, lse};
#else
  TORCH_INTERNAL_ASSERT(false, "partials must be exchanged on CUDA, got ", q.device());
#endif
}

}  // namespace ringattn
