// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernel of one source tree, for head dims up to VARIANT_HEAD_DIM, without the library
// around it: kernel_variants.py compiles and loads it.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "attention/cuda/sm90/launch.h"

using namespace ringattn;

/// q, out [B, S, H, D], k, v [B, S, H_kv, D], bfloat16; state [B, S, H, D], lse [B, H, S], float32;
/// all contiguous. Without a state, rows are final, in out; with one, they are folded into it.
/// Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int attend(void* q, void* k, void* v, void* out,
                                                             void* state, float* lse, int batch,
                                                             int rows, int num_heads,
                                                             int num_kv_heads, int head_dim,
                                                             int diagonal, int tile_rows,
                                                             float scale, void* stream) {
  if (head_dim < 1 || head_dim > VARIANT_HEAD_DIM || head_dim % 8 != 0)
    return cudaErrorInvalidValue;
  const auto strided = [&](void* data, int64_t heads) {
    return Strided{data, rows * heads * head_dim, heads * head_dim, int64_t{head_dim}};
  };
  KeySegment segment;
  segment.k = strided(k, num_kv_heads);
  segment.v = strided(v, num_kv_heads);
  segment.num_keys = rows;
  segment.diagonal = std::clamp(diagonal, -rows, rows);

  BlockAttentionParams params;
  params.q = strided(q, num_heads);
  params.segments = &segment;
  params.num_segments = 1;
  params.batch = batch;
  params.num_queries = rows;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim = head_dim;
  params.scale = scale;
  params.dtype = DataType::kBFloat16;
  params.tile_rows = tile_rows;
  params.fold = state != nullptr;
  if (params.fold) {
    params.state = strided(state, num_heads);
  } else {
    params.out = strided(out, num_heads);
    params.final_end = rows;
  }
  params.lse = lse;
  params.lse_head_stride = rows;
  params.lse_batch_stride = int64_t{num_heads} * rows;
  return cuda::sm90::launch_block_attention<__nv_bfloat16, VARIANT_HEAD_DIM>(
      params, static_cast<cudaStream_t>(stream));
}
