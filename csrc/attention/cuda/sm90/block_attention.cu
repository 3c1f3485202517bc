// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/cuda/sm90/launch.h"

namespace ringattn::cuda::sm90 {
namespace {

template <typename Element>
cudaError_t dispatch_general(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_general_block_attention<Element, 64>(p, stream);
  if (p.head_dim <= 128) return launch_general_block_attention<Element, 128>(p, stream);
  return launch_general_block_attention<Element, 256>(p, stream);
}

template <typename Element>
cudaError_t dispatch_head_dim(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.is_general()) return dispatch_general<Element>(p, stream);
  if (p.head_dim <= 64) return launch_block_attention<Element, 64>(p, stream);
  if (p.head_dim <= 128) return launch_block_attention<Element, 128>(p, stream);
  return launch_block_attention<Element, 256>(p, stream);
}

}  // namespace

bool available() {
  static thread_local int known_device = -1;
  static thread_local bool known = false;
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device != known_device) {
    known =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
        major == 9 && minor == 0;
    known_device = device;
  }
  return known;
}

bool supports(const AttentionShape& shape) {
  return shape.dtype != DataType::kFloat32 && shape.head_dim > 0 && shape.head_dim <= 256;
}

cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  return p.dtype == DataType::kFloat16 ? dispatch_head_dim<__half>(p, stream)
                                       : dispatch_head_dim<__nv_bfloat16>(p, stream);
}

}  // namespace ringattn::cuda::sm90
