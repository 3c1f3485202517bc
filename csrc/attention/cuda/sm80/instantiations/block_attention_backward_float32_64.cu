// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm80/block_attention_backward_kernel.cuh"

namespace ringattn::cuda::sm80 {

template cudaError_t launch_block_attention_backward<float, 64>(const BlockAttentionBackwardParams&,
                                                                cudaStream_t);

}  // namespace ringattn::cuda::sm80
