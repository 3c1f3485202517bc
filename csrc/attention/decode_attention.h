// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "core/export.h"
#include "core/shape.h"
#include "peer_sync/partial_exchange.h"

namespace ringattn {

/// Few queries [B, T, H, D] against this rank's cached keys k, v [B, S_k, H_kv, D]. Batch row b
/// sees its first key_lengths[b] keys (int32 [B], clamped to [0, S_k]); without key_lengths, all.
/// Returns one buffer in state dtype: out [B, T, H, D], then lse [B, H, T], so that ranks exchange
/// it in one message. S_k may be 0.
RINGATTN_API at::Tensor decode_partial(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, double scale,
                                       const std::optional<at::Tensor>& key_lengths = {});

/// The same where no other rank has keys: out like q and lse [B, H, T] in state dtype.
RINGATTN_API std::pair<at::Tensor, at::Tensor> decode_alone(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
    const std::optional<at::Tensor>& key_lengths = {});

/// Merges what decode_partial returned on every rank, partials [W, B * T * H * (D + 1)], in rank
/// order. Returns out like q and lse [B, H, T] in state dtype.
RINGATTN_API std::pair<at::Tensor, at::Tensor> merge_partials(const at::Tensor& partials,
                                                              const at::Tensor& q);

/// Bytes of what decode_partial returns for these queries.
RINGATTN_API int64_t partial_bytes(const at::Tensor& q);

/// On CUDA, by all ranks, in one kernel: gives them what decode_partial returned on this rank, and
/// merges what it returned on each of them: merge_partials, bit for bit. Results are NaN after a
/// failure.
RINGATTN_API std::pair<at::Tensor, at::Tensor> exchange_partials(const at::Tensor& partial,
                                                                 const at::Tensor& q,
                                                                 const PartialExchange& exchange);

}  // namespace ringattn
