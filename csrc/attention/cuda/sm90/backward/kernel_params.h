// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/cuda/query_bounds.h"
#include "attention/params.h"

// What the host gives to a kernel of the backward.

namespace ringattn::cuda::sm90 {

/// Parameters of the kernel. Tensor maps: (D, rows, heads, batch).
struct BackwardKernelParams {
  CUtensorMap q;         // in boxes of [kBlockQ, 64]
  CUtensorMap grad_out;  // [kBlockQ, 64]
  CUtensorMap k;         // [kBlockK, 64]
  CUtensorMap v;         // [kBlockK, 64]
  CUtensorMap dq;        // float32, [64, 32]

  const float* lse;    // [B, H, S_q], natural log
  const float* delta;  // [B, H, S_q], strides of lse
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  Strided dk;             // [B, S_k, H_kv, D]
  Strided dv;             // [B, S_k, H_kv, D]
  bool rounds_key_grads;  // dk and dv are 16-bit types, not float32

  QueryBounds bounds;
  int batch;
  int num_kv_heads;
  int heads_per_kv_head;
  int ranks;           // thread blocks that share the heads of a group: 1, 2 or 4; of pairs 1
  int heads_per_rank;  // heads_per_kv_head / ranks
  int head_dim;
  float scale;
  // With x the raw score: exp2(x * score_log2 - lse * log2(e)), and with a softcap
  // exp2(tanh(x * softcap_inner) * score_log2 - lse * log2(e)).
  float score_log2;
  // Without a softcap -log2(e) / score_log2: exp2((x + lse * lse_to_term) * score_log2).
  float lse_to_term;
  float softcap_inner;
  float masked_score;  // of which exp2 is 0

  // Order of the work tiles: slices of planes (KV heads of all batch entries); in a slice tile of
  // keys after tile of keys, for each of them all planes of the slice.
  int num_key_tiles;     // of a plane
  int planes_per_slice;  // of a full slice
  int* next_ticket;      // of kernels by ticket. In device memory, 0 before the launch
  // Likewise, [planes][num_key_tiles][thread blocks of a cluster][parts of dq] (turns.cuh). null:
  // dq in any order.
  int* progress;
};

}  // namespace ringattn::cuda::sm90
