// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm80/decode_attention_kernel.cuh"

namespace ringattn::cuda::sm80 {

template cudaError_t launch_decode_attention<__half, 64>(const DecodeAttentionParams&, int,
                                                         cudaStream_t);
template cudaError_t launch_decode_attention<__half, 128>(const DecodeAttentionParams&, int,
                                                          cudaStream_t);
template cudaError_t launch_decode_attention<__half, 256>(const DecodeAttentionParams&, int,
                                                          cudaStream_t);

}  // namespace ringattn::cuda::sm80
