// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/band.h"
#include "core/shape.h"
#include "peer_sync/protocol.h"

// What the operator and its implementation for one kind of device share.

namespace ringattn {

/// float64 for float64 inputs, float32 for all others: the type of states, lse and every partial
/// result.
inline at::ScalarType state_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// Keys and values, and which of them the rows of a call see.
struct KeyBlock {
  at::Tensor k;  // [B, S_k, H_kv, D]
  at::Tensor v;
  Band band;                // of the call's query rows and these key rows
  RemoteBlock source = {};  // see KeySegment; without data: a local block

  bool is_remote() const { return source.data != nullptr; }
};

/// Where the result of one call is written, and what it is merged with. Shapes are those of the
/// call's rows.
struct AttentionResult {
  at::Tensor out;    // [B, S_q, H, D], q's dtype: rows [final_begin, final_end) are written;
                     // undefined if none
  at::Tensor state;  // [B, S_q, H, D], state dtype: the other rows; undefined if every row is final
                     // and nothing is folded. A list that takes several launches leaves results of
                     // its earlier ones in the final rows.
  at::Tensor lse;    // [B, H, S_q], state dtype
  bool fold = false;  // state and lse hold earlier keys
  int64_t final_begin = 0;
  int64_t final_end = 0;
};

}  // namespace ringattn
