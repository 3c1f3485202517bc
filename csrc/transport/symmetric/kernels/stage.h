// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/export.h"
#include "peer_sync/protocol.h"

namespace ringattn::cuda {

constexpr int kMaxPeers = PeerSignals::kMaxPeers;
/// What one load or store moves.
constexpr int kVectorBytes = 16;
/// KV heads are signalled in groups, at most so many.
constexpr int kMaxHeadGroups = 8;
constexpr int kStageCounters = 1 + kMaxHeadGroups;

/// Strided memory of shape [B, rows, H_kv, D]; strides in bytes, rows of D contiguous.
struct StageSource {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

/// Tags of the call (protocol.h). Nothing is fetched from a rank whose tag differs.
struct CallTags {
  uint32_t value = 0;  // of this rank; not 0
  uint32_t* by_this_rank[kMaxPeers] = {};
  const uint32_t* by_peer[kMaxPeers] = {};
  /// Host memory: 1 + the index of a peer in another call, or kMaxPeers more where that peer has
  /// only reported a mismatch (kMismatchTag).
  uint32_t* mismatch = nullptr;
};

/// A block on its way to memory that peers read, and the signals about it, named as in PeerSignals.
///
/// Staged, the block is [H_kv, 2, B, rows, D]: any range of KV heads, keys and values, is
/// contiguous.
struct StageParams {
  StageSource k, v;        // rows of D; addresses and strides are multiples of kVectorBytes
  void* staged = nullptr;  // [H_kv, 2, B, staged_rows, D]: the first `rows` rows are written
  int batch = 1;
  int rows = 0;  // 0: nothing is copied, the signals are given all the same
  int staged_rows = 0;
  int num_kv_heads = 1;
  int64_t row_bytes = 0;   // of D elements; a last vector may be cut short, and is copied whole
  bool keys_only = false;  // there are no values: [H_kv, B, rows, D]

  uint32_t* read_by_peer[kMaxPeers] = {};         // waited for, then cleared
  uint32_t* staged_by_this_rank[kMaxPeers] = {};  // set when all copying thread blocks run, and
                                                  // then for each group of heads
  uint32_t* read_mirror_by_peer[kMaxPeers] = {};  // host memory: cleared; null: none, in tests
  uint32_t* staged_mirror_by_this_rank[kMaxPeers] = {};  // host memory: the tag, after all heads
  int num_peers = 0;

  /// A kernel fetches what peers stage, the next one on the stream. This one leaves most of the
  /// device to it, and triggers it once all of `staged_by_peer` are set: one thread block waits for
  /// that, and then compares the peers' tags. Where copy engines fetch, streams wait instead.
  bool kernel_fetches = false;
  /// Programmatic dependent launch, which saves the gap behind a kernel on the same stream.
  bool follows_closely = false;
  const uint32_t* staged_by_peer[kMaxPeers] = {};
  int num_awaited = 0;  // num_peers, or 0 where no kernel fetches

  CallTags tags;  // of the peers, in the same order
  /// kGivenUp: nothing is written and nothing signalled. kCallMismatch is written here.
  uint32_t* failed = nullptr;
  const uint32_t* given_up = nullptr;       // host memory
  const uint32_t* given_up_copy = nullptr;  // not 0: as kGivenUp; null: no stream copies
  uint32_t* blocks_done = nullptr;          // [kStageCounters], 0 before and after
  uint32_t* calls = nullptr;                // incremented by each launch,
  uint32_t* host_calls = nullptr;           // and copied here, to host memory,
  uint32_t* host_phase = nullptr;           // as `phase` is here
  uint32_t phase = 0;
  /// For tests: if not 0, heads are delayed by random times drawn from it.
  uint32_t delay_seed = 0;
};

RINGATTN_API cudaError_t stage(const StageParams& params, cudaStream_t stream);
/// The same for what lies where peers read it: only the signals, by one warp. No kernel fetches.
RINGATTN_API cudaError_t signal_staged(const StageParams& params, cudaStream_t stream);

}  // namespace ringattn::cuda
