// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

#include "attention/params.h"
#include "core/shape.h"
#include "peer_sync/protocol.h"

// What the operator and its implementation for one kind of device share.

namespace ringattn {

/// float64 for float64 inputs, float32 for all others: the type of states, lse and every partial
/// result.
inline at::ScalarType state_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// How scores are made of products, and what joins them.
struct Scoring {
  double scale = 1.0;    // finite
  double softcap = 0.0;  // scores become softcap * tanh(score / softcap), before the mask; 0: off
  at::Tensor sinks;      // [H], state dtype on CPU, float32 on CUDA, contiguous: see
                         // BlockAttentionParams; undefined: none

  Scoring(double scale) : scale(scale) {}  // NOLINT: a scale alone is the usual case
};

/// Keys and values, and which of them the rows of a call see.
struct KeyBlock {
  /// A diagonal that hides no key.
  static constexpr int64_t kNoMask = std::numeric_limits<int64_t>::max();

  at::Tensor k;  // [B, S_k, H_kv, D]
  at::Tensor v;
  int64_t first_query = 0;     // rows before it see none of the keys
  int64_t diagonal = kNoMask;  // row i sees key j when j - i <= diagonal
  // int32 [S_q, 2], contiguous, on q's device: row i sees keys [begin, end), see KeySegment; then
  // first_query is 0 and there is no diagonal. Undefined: none.
  at::Tensor key_ranges = {};
  HostTable host_table = {};  // a copy of it, see KeySegment
  // In a backward instead of key_ranges, int32 [S_k, 2]: the rows that see each key, see
  // BlockAttentionBackwardParams.
  at::Tensor query_ranges = {};
  RemoteBlock source = {};  // see KeySegment; without data: a local block
  int64_t keys_behind = 0;  // likewise

  bool is_remote() const { return source.data != nullptr; }
};

/// Where the result of one call is written, and what it is merged with. Shapes are those of the
/// call's rows.
struct AttentionResult {
  at::Tensor out;    // [B, S_q, H, D], q's dtype: rows [final_begin, final_end) are written;
                     // undefined if none
  at::Tensor state;  // [B, S_q, H, D], state dtype: the other rows; undefined if every row is final
                     // and nothing is folded
  at::Tensor lse;    // [B, H, S_q], state dtype
  bool fold = false;  // state and lse hold earlier keys
  int64_t final_begin = 0;
  int64_t final_end = 0;
};

/// What reaches the rows of a call from behind, and what their forward left.
struct RowGradients {
  at::Tensor grad_out;  // [B, S_q, H, D], q's dtype
  at::Tensor lse;       // [B, H, S_q], state dtype, contiguous: over all keys that the rows see
  at::Tensor delta;     // [B, H, S_q], state dtype, contiguous: rowsum(grad_out * out) - grad_lse
  at::Tensor dq;        // [B, S_q, H, D], state dtype: what the rows' gradients are added to
};

}  // namespace ringattn
