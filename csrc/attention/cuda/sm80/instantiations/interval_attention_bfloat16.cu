// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm80/interval_attention_kernel.cuh"

namespace ringattn::cuda::sm80 {

template cudaError_t launch_interval_attention<__nv_bfloat16, 64>(const BlockAttentionParams&,
                                                                  cudaStream_t);
template cudaError_t launch_interval_attention<__nv_bfloat16, 96>(const BlockAttentionParams&,
                                                                  cudaStream_t);
template cudaError_t launch_interval_attention<__nv_bfloat16, 128>(const BlockAttentionParams&,
                                                                   cudaStream_t);
template cudaError_t launch_interval_attention<__nv_bfloat16, 192>(const BlockAttentionParams&,
                                                                   cudaStream_t);
template cudaError_t launch_interval_attention<__nv_bfloat16, 256>(const BlockAttentionParams&,
                                                                   cudaStream_t);

}  // namespace ringattn::cuda::sm80
