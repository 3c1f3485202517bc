// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm90/backward/launch.cuh"

namespace ringattn::cuda::sm90 {

template cudaError_t launch_block_attention_backward<__nv_bfloat16, 256>(
    const BlockAttentionBackwardParams&, cudaStream_t);

}  // namespace ringattn::cuda::sm90
