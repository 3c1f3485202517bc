// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ringattn::cuda {

constexpr int kMaxSignals = 16;
constexpr int kStagePiece = 16;  // bytes that are read and written at once

/// Strided memory of shape [B, rows, H_kv, D]; strides in bytes, rows of D contiguous.
struct StageSource {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

/// A block on its way to memory that other ranks read, and whom to tell.
///
/// There it lies as [H_kv, 2, B, rows, D]: any range of key heads, keys and values, is contiguous.
struct StageParams {
  StageSource k, v;        // rows of D, address and strides in whole pieces of kStagePiece bytes
  void* staged = nullptr;  // [H_kv, 2, B, staged_rows, D]: the first `rows` rows are written
  int batch = 0;
  int rows = 0;  // 0: nothing is copied, the signals are given all the same
  int staged_rows = 0;
  int num_kv_heads = 0;
  int row_bytes = 0;  // of D elements

  uint32_t* taken_back[kMaxSignals] = {};  // of this rank; first waited for to be 1, set to 0 at
  uint32_t* signals[kMaxSignals] = {};     // the end, before these, of other ranks, are set to 1
  int num_signals = 0;
  uint32_t* blocks_done = nullptr;  // 0 before and after
  // Host memory.
  uint32_t* waiting = nullptr;  // set to 1 if there is something to wait for
  uint32_t* count = nullptr;    // goes up by one for each call
};

cudaError_t stage(const StageParams& params, cudaStream_t stream);

}  // namespace ringattn::cuda
