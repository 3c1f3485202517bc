// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "core/export.h"
#include "core/shape.h"
#include "peer_sync/partial_exchange.h"

namespace ringattn {

/// Which keys a batch row sees, and what happens to its scores.
struct DecodeMask {
  std::optional<at::Tensor> key_lengths;  // int32 [B]: row b sees its first key_lengths[b] keys,
                                          // clamped to [0, S_k]; without: all of them
  std::optional<at::Tensor> key_begins;   // int32 [B]: but not those before key_begins[b], likewise
  double softcap = 0.0;                   // scores become softcap * tanh(score / softcap); 0: off
  std::optional<at::Tensor> sinks;        // [H], of any float type: joins the softmax's denominator
};

/// Few queries [B, T, H, D] against this rank's cached keys k, v [B, S_k, H_kv, D]. Returns one
/// buffer in state dtype: out [B, T, H, D], then lse [B, H, T], so that ranks exchange it in one
/// message. S_k may be 0. Of the ranks whose partials are merged, one gives sinks.
RINGATTN_API at::Tensor decode_partial(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, double scale,
                                       const DecodeMask& mask = {});

/// The same where no other rank has keys: out [B, T, H, D] in `dtype`, q's or state dtype, and lse
/// [B, H, T] in state dtype.
RINGATTN_API std::pair<at::Tensor, at::Tensor> decode_alone(const at::Tensor& q,
                                                            const at::Tensor& k,
                                                            const at::Tensor& v, double scale,
                                                            const DecodeMask& mask,
                                                            at::ScalarType dtype);

/// Merges what decode_partial returned on every rank, partials [W, B * T * H * (D + 1)], in rank
/// order. Returns what decode_alone does.
RINGATTN_API std::pair<at::Tensor, at::Tensor> merge_partials(const at::Tensor& partials,
                                                              const at::Tensor& q,
                                                              at::ScalarType dtype);

/// Bytes of what decode_partial returns for these queries.
RINGATTN_API int64_t partial_bytes(const at::Tensor& q);

/// On CUDA, by all ranks, in one kernel: gives them what decode_partial returned on this rank, and
/// merges what it returned on each of them: merge_partials, bit for bit. Results are NaN after a
/// failure.
RINGATTN_API std::pair<at::Tensor, at::Tensor> exchange_partials(const at::Tensor& partial,
                                                                 const at::Tensor& q,
                                                                 at::ScalarType dtype,
                                                                 const PartialExchange& exchange);

}  // namespace ringattn
