// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/export.h"
#include "peer_sync/protocol.h"

namespace ringattn::cuda {

/// What one peer has staged, on its way to memory of this device. The launch follows the staging
/// kernel (StageParams::kernel_fetches).
struct FetchParams {
  const void* from = nullptr;  // memory of the peer; both addresses are multiples of kVectorBytes
  void* to = nullptr;
  int64_t bytes = 0;  // 0: nothing is read, the signals are given all the same
  /// A message is staged as a block of one head. The kernel waits until all peers have staged
  /// theirs, reads, signals `read` to them, and ends when they have read this rank's.
  RemoteFetch remote_fetch;
};

/// Loads the kernel. To be called before the staging kernel is launched: that kernel waits for
/// other ranks, and the driver may load no other kernel before it has ended.
RINGATTN_API void load_fetch();
RINGATTN_API cudaError_t fetch(const FetchParams& params, cudaStream_t stream);

}  // namespace ringattn::cuda
