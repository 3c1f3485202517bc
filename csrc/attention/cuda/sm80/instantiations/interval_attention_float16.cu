// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm80/interval_attention_kernel.cuh"

namespace ringattn::cuda::sm80 {

template cudaError_t launch_interval_attention<__half, 64>(const BlockAttentionParams&,
                                                           cudaStream_t);
template cudaError_t launch_interval_attention<__half, 96>(const BlockAttentionParams&,
                                                           cudaStream_t);
template cudaError_t launch_interval_attention<__half, 128>(const BlockAttentionParams&,
                                                            cudaStream_t);
template cudaError_t launch_interval_attention<__half, 192>(const BlockAttentionParams&,
                                                            cudaStream_t);
template cudaError_t launch_interval_attention<__half, 256>(const BlockAttentionParams&,
                                                            cudaStream_t);

}  // namespace ringattn::cuda::sm80
