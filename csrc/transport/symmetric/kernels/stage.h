// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/export.h"
#include "peer_sync/protocol.h"

namespace ringattn::cuda {

constexpr int kMaxSignals = Notices::kMaxPeers;
constexpr int kStagePiece = 16;  // bytes that are read and written at once
/// Peers are told of some heads at a time, and in so many parts at most.
constexpr int kMostStagedParts = 8;
constexpr int kStageCounters = 1 + kMostStagedParts;

/// Strided memory of shape [B, rows, H_kv, D]; strides in bytes, rows of D contiguous.
struct StageSource {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

/// What kind of call each rank is in: it says so before it says that it stages, and nothing is
/// fetched from who is in another one.
struct CallTags {
  uint32_t own = 0;                  // the same on all ranks, not 0; another one in other kinds
  uint32_t* told[kMaxSignals] = {};  // of other ranks: where this one says it
  const uint32_t* theirs[kMaxSignals] = {};  // of this rank: what they have said
  /// Host memory: the place in `theirs`, from 1 on, of one in another call; kMaxSignals more where
  /// it says kNoCall.
  uint32_t* unlike = nullptr;
};

/// A block on its way to memory that other ranks read, and whom to tell.
///
/// There it lies as [H_kv, 2, B, rows, D]: any range of key heads, keys and values, is contiguous.
struct StageParams {
  StageSource k, v;        // rows of D, address and strides in whole pieces of kStagePiece bytes
  void* staged = nullptr;  // [H_kv, 2, B, staged_rows, D]: the first `rows` rows are written
  int batch = 1;
  int rows = 0;  // 0: nothing is copied, the signals are given all the same
  int staged_rows = 0;
  int num_kv_heads = 1;
  int64_t row_bytes = 0;   // of D elements; a last piece may be cut short, and is copied whole
  bool keys_only = false;  // there are no values: [H_kv, B, rows, D]

  /// Of this rank; 1, or about to be, and set to 0 before.
  uint32_t* taken_back[kMaxSignals] = {};
  /// These, of other ranks, say how much is staged (protocol.h), first when all thread blocks
  /// that copy run: from then on it needs nothing more.
  uint32_t* signals[kMaxSignals] = {};
  /// The same for who waits in streams: of this rank, set to 0; of other ranks, set to tags.own
  /// behind everything else. Null: nobody does.
  uint32_t* taken_back_for_streams[kMaxSignals] = {};
  uint32_t* signals_for_streams[kMaxSignals] = {};
  int num_signals = 0;

  /// A kernel fetches what others stage, the next one on the stream. This one leaves most of the
  /// device to it, which begins when none of `awaited`, of this rank, is 0 any more. One thread
  /// block waits for that, and then looks at their tags. Where copy engines fetch, streams wait.
  bool kernel_fetches = false;
  /// It may be set up while what comes before it on its stream ends: worth it behind kernels.
  bool follows_closely = false;
  const uint32_t* awaited[kMaxSignals] = {};
  int num_awaited = 0;

  CallTags tags;  // of the ranks that are signalled, in their order
  /// kGivenUp: nothing is written and nobody told. kInAnotherCall is written here by who sees it.
  uint32_t* failed = nullptr;
  const uint32_t* given_up = nullptr;  // of the host's (protocol.h)
  /// What streams have last seen there: not 0, as kGivenUp. Null: none do.
  const uint32_t* seen = nullptr;
  uint32_t* blocks_done = nullptr;  // [kStageCounters], 0 before and after
  uint32_t* calls = nullptr;        // goes up by one for each call,
  uint32_t* calls_shown = nullptr;  // and is written here, to host memory,
  uint32_t* phase_shown = nullptr;  // as `phase` is here
  uint32_t phase = 0;
  /// For tests: not 0, heads are late by random times drawn from it.
  uint32_t lateness = 0;
};

RINGATTN_API cudaError_t stage(const StageParams& params, cudaStream_t stream);

}  // namespace ringattn::cuda
