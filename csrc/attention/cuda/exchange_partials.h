// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "core/export.h"
#include "peer_sync/partial_exchange.h"

namespace ringattn::cuda {

/// This rank's partial of decode attention, and where the merge of all ranks' partials goes. The
/// addresses are multiples of 16 bytes; a partial has at most kMaxPartialBytes.
struct ExchangePartialsParams {
  PartialExchange exchange;
  const float* partial = nullptr;  // out [B, S_q, H, D], then lse [B, H, S_q]
  void* out = nullptr;             // [B, S_q, H, D], out_dtype, contiguous
  float* lse = nullptr;            // [B, H, S_q], contiguous
  int32_t batch = 0;
  int32_t num_queries = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;  // a multiple of 4
  DataType out_dtype = DataType::kFloat32;
};

/// By all ranks, with the same shape: gives each rank's partial to all ranks, and merges them in
/// the order of the ranks, on the current device, enqueued on `stream`. The same bits on every
/// rank, those of merge_states. NaN after a failure (peer_sync/partial_exchange.h).
RINGATTN_API cudaError_t exchange_partials(const ExchangePartialsParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda
