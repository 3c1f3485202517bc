// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm80/decode_attention_kernel.cuh"

namespace ringattn::cuda::sm80 {

template cudaError_t launch_decode_attention<__nv_bfloat16, 64>(const DecodeAttentionParams&, int,
                                                                cudaStream_t);
template cudaError_t launch_decode_attention<__nv_bfloat16, 128>(const DecodeAttentionParams&, int,
                                                                 cudaStream_t);
template cudaError_t launch_decode_attention<__nv_bfloat16, 256>(const DecodeAttentionParams&, int,
                                                                 cudaStream_t);

}  // namespace ringattn::cuda::sm80
