// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/params.h"

// The kernel family for compute capability 9.0 (Hopper): float16 and bfloat16. Kernels are
// instantiated in files of their own (instantiations/).

namespace ringattn::cuda::sm90 {

/// The order in which tiles are taken: slices of heads whose keys and values fit L2 together;
/// within a slice, query tiles by length, the slice's heads next to each other.
struct TileOrder {
  int tiles;
  int query_tiles;      // of one head
  int heads;            // B * H
  int heads_per_slice;  // whole groups of H / H_kv
  int slices;
  int slice_tiles;  // of a whole slice
};

/// Keys under one diagonal. A call attends one segment.
struct KeySegment {
  int num_keys;
  int diagonal;
};

/// What the kernel is told. Maps of memory: (D, rows, heads, batch).
struct KernelParams {
  CUtensorMap q;      // in boxes of [kBlockQ, 64]
  CUtensorMap k;      // [kBlockK, 64]
  CUtensorMap v;      // [kBlockK, 64]
  CUtensorMap out;    // [64, 64]; only where rows are final
  CUtensorMap state;  // [kBlockQ, 64]; only with fold, for prefetching

  TileOrder order;
  KeySegment segment;

  Strided out_memory;    // [B, S_q, H, D], 16-bit
  Strided state_memory;  // [B, S_q, H, D], float32
  float* lse;            // [B, H, S_q]
  int64_t lse_batch_stride;
  int64_t lse_head_stride;

  int num_queries;
  int num_heads;
  int heads_per_kv_head;
  int head_dim;
  int final_begin;
  int final_end;
  float scale_log2;  // |scale| * log2(e)
  bool negative_scale;
  bool fold;
};

/// Whether the current device is of compute capability 9.0: code for sm_90a runs nowhere else.
bool available();

/// Whether this family is for such calls: 16-bit types, and keys to attend.
bool supports(const BlockAttentionParams& p);

/// Enqueues p, which must be aligned and supported, on an available device. cudaErrorNotSupported,
/// with nothing enqueued, where the copy engine cannot describe the tensors.
cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream);

/// kHeadDim in {64, 128, 256}: the smallest that holds p.head_dim.
template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda::sm90
