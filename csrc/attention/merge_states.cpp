// SPDX-License-Identifier: Apache-2.0
#include "attention/merge_states.h"

#include <ATen/ops/empty.h>

#include "attention/cpu/merge_states.h"

#ifdef RINGATTN_WITH_CUDA
#include "attention/cuda/merge_states.h"
#include "attention/tensor_params.h"
#endif

namespace ringattn {

#ifdef RINGATTN_WITH_CUDA
namespace {

// Parameters of every merge: into out, from states of which the first is given.
MergeStatesParams merge_params(const at::Tensor& out, const at::Tensor& state,
                               const at::Tensor& state_lse) {
  MergeStatesParams params;
  params.out = strided(out);
  params.states = strided(state);
  params.states_lse = state_lse.data_ptr<float>();
  params.states_lse_batch_stride = state_lse.stride(0);
  params.states_lse_head_stride = state_lse.stride(1);
  params.batch = out.size(0);
  params.num_queries = out.size(1);
  params.num_heads = out.size(2);
  params.head_dim = out.size(3);
  params.out_dtype = data_type(out.scalar_type());
  return params;
}

}  // namespace
#endif

void merge_states_(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& other_out,
                   const at::Tensor& other_lse) {
  if (out.numel() == 0) return;
#ifdef RINGATTN_WITH_CUDA
  if (out.is_cuda()) {
    const InPlace folded_out(out), folded_lse(lse);
    const at::Tensor added_out = as_kernel_input(other_out),
                     added_lse = unit_last_stride(other_lse);
    MergeStatesParams params = merge_params(folded_out.tensor(), added_out, added_lse);
    params.lse = folded_lse.tensor().data_ptr<float>();
    params.lse_batch_stride = folded_lse.tensor().stride(0);
    params.lse_head_stride = folded_lse.tensor().stride(1);
    params.fold = true;
    params.num_states = 1;
    check_launch(cuda::merge_states(params, current_stream(out)), "merge_states");
    return;
  }
#endif
  cpu::merge_states_(out, lse, other_out, other_lse);
}

std::pair<at::Tensor, at::Tensor> merge_all_states(const at::Tensor& outs, const at::Tensor& lses,
                                                   at::ScalarType dtype) {
  const at::Tensor first = outs.select(0, 0), first_lse = lses.select(0, 0);
#ifdef RINGATTN_WITH_CUDA
  if (outs.is_cuda()) {
    at::Tensor out = at::empty(first.sizes(), outs.options().dtype(dtype));
    at::Tensor lse = at::empty(first_lse.sizes(), lses.options());
    if (out.numel() == 0) return {out, lse};
    MergeStatesParams params = merge_params(out, first, first_lse);
    params.lse = lse.data_ptr<float>();
    params.lse_batch_stride = lse.stride(0);
    params.lse_head_stride = lse.stride(1);
    params.next_state = outs.stride(0);
    params.next_state_lse = lses.stride(0);
    params.num_states = outs.size(0);
    check_launch(cuda::merge_states(params, current_stream(out)), "merge_states");
    return {out, lse};
  }
#endif
  at::Tensor out = first.clone(), lse = first_lse.clone();
  for (int64_t state = 1; state < outs.size(0); ++state) {
    merge_states_(out, lse, outs.select(0, state), lses.select(0, state));
  }
  return {out.to(dtype), lse};
}

}  // namespace ringattn
