// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
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

/// Whether one call attends q to a list of blocks, of any length, and, on CUDA, fetches up to
/// PeerSignals::kMaxPeers of them by itself.
RINGATTN_API bool supports_segment_lists(const at::Tensor& q);

/// The tiles in which a device's kernel computes calls of many rows, the fastest first. None: it
/// has no tiles, and computes exactly the rows and keys of the call.
RINGATTN_API std::vector<AttentionTile> attention_tiles(c10::Device device, at::ScalarType dtype,
                                                        int64_t head_dim);

/// x [B, S, H, D] itself, or a copy where its strides or address do not suit the kernels.
RINGATTN_API at::Tensor as_attention_input(const at::Tensor& x);

/// Attends q to a list of blocks, in its order. On CUDA: in one launch, or in several where the
/// list is longer than a kernel takes; with more than one block only where supports_segment_lists;
/// with bands that hold all rows from some row on, all keys, and no lower limit. No other kernel
/// exists there. `options`: which of `remote_fetch` must be there (params.h); the CPU ignores both.
RINGATTN_API void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks,
                                  double scale, const AttentionResult& result,
                                  const LaunchOptions& options = {},
                                  const RemoteFetch& remote_fetch = {});

/// Attends q [B, S_q, H, D] to k, v [B, S_k, H_kv, D] under `diagonal`, folds the earlier state in
/// where there is one, and writes `result`. Any strides. On CUDA: runs on the current stream.
RINGATTN_API void block_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  double scale, std::optional<int64_t> diagonal,
                                  const AttentionResult& result);

/// The same without an earlier state: out [B, S_q, H, D] in `out_dtype` and lse [B, H, S_q].
RINGATTN_API std::pair<at::Tensor, at::Tensor> block_attention(const at::Tensor& q,
                                                               const at::Tensor& k,
                                                               const at::Tensor& v, double scale,
                                                               std::optional<int64_t> diagonal,
                                                               at::ScalarType out_dtype);

}  // namespace ringattn
