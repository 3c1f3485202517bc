// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/export.h"
#include "peer_sync/protocol.h"

namespace ringattn::cuda {

/// What one peer has staged on its way to memory of this device. The kernel follows the one that
/// stages (StageParams::kernel_fetches).
struct FetchParams {
  const void* from = nullptr;  // of the peer; both at whole pieces of kStagePiece bytes
  void* to = nullptr;
  int64_t bytes = 0;  // 0: nothing is read, and the peers are told all the same
  /// Every peer stages one head, as it were. When all have, and it is read, they are told; the
  /// kernel ends when they have read what is here.
  Bringing bringing;
};

/// Before the kernel that stages is launched: the driver may let nobody load another one until that
/// one has ended, which waits for other ranks.
RINGATTN_API void load_fetch();
RINGATTN_API cudaError_t fetch(const FetchParams& params, cudaStream_t stream);

}  // namespace ringattn::cuda
