// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/symmetric/kernels/stage.h"
#include "transport/symmetric/peer_device_memory.h"
#include "transport/symmetric/signal_pad.h"
#include "transport/transport.h"

// Where the blocks of a one-sided ring lie, and how they are copied. A block, staged or fetched, is
// [H_kv, 2, B, rows, D]: any range of heads is contiguous.

namespace ringattn {

/// The copy of a range of a block's rows from where its owner has staged them to this rank. A
/// plane: the rows of one head and batch entry, keys or values.
struct CopyPlan {
  const char* from = nullptr;
  char* to = nullptr;
  size_t plane_bytes = 0;  // copied of each plane
  size_t from_pitch = 0;   // bytes between planes of the staged block
  size_t to_pitch = 0;
  size_t planes = 0;
};

/// The memory of one kind of ring call. Addresses do not change from call to call.
struct MemoryPlan {
  at::Tensor memory;  // the fetched blocks, bytes
  ResidentBlocks resident;
  // [W - 1]: of each block the ranges of its rows. Empty where a kernel fetches the blocks.
  std::vector<std::vector<CopyPlan>> copies;
  std::shared_ptr<const std::vector<int64_t>> step_of_rank;
};

/// k or v [B, S_r, H_kv, D] for the staging kernel. `x` must be as as_stage_input returns it.
cuda::StageSource stage_source(const at::Tensor& x);
/// x itself, or a copy where its strides or address are no multiples of kVectorBytes.
at::Tensor as_stage_input(const at::Tensor& x);

/// Equal for calls of one kind: the key of their MemoryPlan.
std::vector<int64_t> plan_key(const RingExchangePlan& exchange);

/// Bytes for fetched blocks, up to depth + 1 at a time.
int64_t fetched_bytes(const RingExchangePlan& exchange);

/// `fetched`: at least fetched_bytes(). Where a kernel fetches, sources instead of copies, as yet
/// without RemoteBlock::parts.
std::unique_ptr<MemoryPlan> plan_memory(const RingExchangePlan& exchange,
                                        const PeerDeviceMemory& staged, const at::Tensor& fetched,
                                        const SignalPad& signal_pad);

}  // namespace ringattn
