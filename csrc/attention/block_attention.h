// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "attention/attention_call.h"
#include "attention/params.h"
#include "core/attention_tile.h"
#include "core/export.h"
#include "core/shape.h"
#include "peer_sync/protocol.h"

// Block attention on tensors of any device that has kernels. Arguments have been checked by the
// caller.

namespace ringattn {

/// Whether one call attends q to a list of blocks and, on CUDA, fetches up to
/// PeerSignals::kMaxPeers of them by itself.
RINGATTN_API bool supports_segment_lists(const at::Tensor& q);

/// The tiles in which a device's kernel computes calls of many rows, the fastest first. None: it
/// has no tiles, and computes exactly the rows and keys of the call.
RINGATTN_API std::vector<AttentionTile> attention_tiles(c10::Device device, at::ScalarType dtype,
                                                        int64_t head_dim);

/// x [B, S, H, D] itself, or a copy where its strides or address do not suit the kernels.
RINGATTN_API at::Tensor as_attention_input(const at::Tensor& x);

/// Attends q to a list of blocks, in its order. On CUDA in one launch; with more than one block, up
/// to PeerSignals::kMaxPeers, only where supports_segment_lists, and `first_query` is 0 or the same
/// in all of them. `options`: which of `remote_fetch` must be there (params.h); the CPU ignores
/// both.
RINGATTN_API void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks,
                                  const Scoring& scoring, const AttentionResult& result,
                                  const LaunchOptions& options = {},
                                  const RemoteFetch& remote_fetch = {});

/// The same of one block without an earlier state: out [B, S_q, H, D] in `out_dtype`, q's dtype or
/// the state's, and lse [B, H, S_q]. Any strides. On CUDA: runs on the current stream.
RINGATTN_API std::pair<at::Tensor, at::Tensor> block_attention(const at::Tensor& q,
                                                               const KeyBlock& block,
                                                               const Scoring& scoring,
                                                               at::ScalarType out_dtype);

}  // namespace ringattn
