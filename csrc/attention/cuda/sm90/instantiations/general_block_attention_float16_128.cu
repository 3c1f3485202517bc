// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm90/launch.cuh"

namespace ringattn::cuda::sm90 {

template cudaError_t launch_general_block_attention<__half, 128>(const BlockAttentionParams&,
                                                                 cudaStream_t);

}  // namespace ringattn::cuda::sm90
