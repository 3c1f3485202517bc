// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "attention/params.h"
#include "core/attention_tile.h"
#include "core/export.h"

namespace ringattn::cuda {

/// Whether the current device has kernels for calls like this one with up to
/// PeerSignals::kMaxPeers segments, or with remote ones: compute capability 9.0, 16-bit types.
RINGATTN_API bool supports_segment_lists(const AttentionShape& shape);

/// The tiles in which calls of many rows are computed on the current device, the fastest first.
RINGATTN_API std::vector<AttentionTile> attention_tiles(DataType dtype, int head_dim);

/// Block attention on the current device, enqueued on `stream`. Needs compute capability 8.0 and
/// aligned rows (alignment.h). The same inputs give the same bits. With nothing enqueued:
/// cudaErrorNotSupported for lists of segments where supports_segment_lists is false,
/// cudaErrorInvalidValue for too many segments and, on compute capability 9.0, for modes of
/// LaunchOptions without what they need or with more.
/// A call without queries launches nothing, and leaves the scratch as it is.
RINGATTN_API cudaError_t block_attention(const BlockAttentionParams& p, cudaStream_t stream);

}  // namespace ringattn::cuda
