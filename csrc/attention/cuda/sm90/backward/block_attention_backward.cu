// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "attention/cuda/alignment.h"
#include "attention/cuda/sm90/backward/cluster_choice.h"
#include "attention/cuda/sm90/backward/launch.h"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/device_limits.h"

namespace ringattn::cuda::sm90 {
namespace {

template <typename Element>
cudaError_t dispatch_head_dim(const BlockAttentionBackwardParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_block_attention_backward<Element, 64>(p, stream);
  if (p.head_dim <= 128) return launch_block_attention_backward<Element, 128>(p, stream);
  return launch_block_attention_backward<Element, 256>(p, stream);
}

bool all_rows_are_aligned(const BlockAttentionBackwardParams& p) {
  const auto of_queries = [&](const Strided& x, int bytes) {
    return rows_are_aligned(x, bytes, p.batch, p.num_queries, p.num_heads);
  };
  const auto of_keys = [&](const Strided& x, int bytes) {
    return rows_are_aligned(x, bytes, p.batch, p.num_keys, p.num_kv_heads);
  };
  const int key_gradients = p.rounds_key_gradients ? 2 : 4;
  return of_queries(p.q, 2) && of_queries(p.grad_out, 2) && of_queries(p.dq, 4) &&
         of_keys(p.k, 2) && of_keys(p.v, 2) && of_keys(p.dk, key_gradients) &&
         of_keys(p.dv, key_gradients);
}

}  // namespace

bool supports_backward(const BlockAttentionBackwardParams& p) {
  const bool has_kernel = p.dtype != DataType::kFloat32 && p.head_dim > 0 &&
                          p.head_dim <= (p.deterministic ? 128 : 256) && p.group_parts == 1;
  const float scale = std::fabs(p.scale);
  const bool divides = p.softcap != 0.0f || scale == 0.0f ||
                       (scale >= kSmallestScale && scale <= 1 / kSmallestScale);
  const bool has_work =
      p.batch > 0 && p.num_heads > 0 && p.num_queries > 0 && p.num_kv_heads > 0 && p.num_keys > 0;
  return has_kernel && divides && has_work && all_rows_are_aligned(p);
}

bool gains_by_semaphore(const BlockAttentionBackwardParams& p) {
  using Tile = BackwardTile128;  // measured (docs/log/kernel-sm90-backward.md)
  if (p.head_dim <= BackwardTile64::kHeadDim || p.head_dim > Tile::kHeadDim ||
      !supports_backward(p)) {
    return false;
  }
  int device = 0;
  DeviceLimits limits;
  if (cudaGetDevice(&device) != cudaSuccess || device_limits(device, limits) != cudaSuccess) {
    return false;
  }
  const int thread_blocks = limits.multiprocessors - p.leaves_room;
  return gains_by_tickets(work_tiles_of<Tile>(p), thread_blocks) &&
         !wants_pairs<BackwardTile128, BackwardPair128>(p, thread_blocks);
}

cudaError_t block_attention_backward(const BlockAttentionBackwardParams& p, cudaStream_t stream) {
  return p.dtype == DataType::kFloat16 ? dispatch_head_dim<__half>(p, stream)
                                       : dispatch_head_dim<__nv_bfloat16>(p, stream);
}

}  // namespace ringattn::cuda::sm90
