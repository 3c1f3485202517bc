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

// Where the blocks of a one-sided ring lie, and how they are copied. A block, staged or visiting,
// is [H_kv, 2, B, rows, D]: any range of heads is contiguous.

namespace ringattn {

/// Rows of a block, all planes (a head of a batch, keys or values), from where its owner has staged
/// it to where this rank attends to it.
struct Copy {
  const char* from = nullptr;
  char* to = nullptr;
  size_t plane_bytes = 0;  // that are copied
  size_t pitch = 0;        // of the staged block
  size_t planes = 0;
};

/// What a kind of ring call does with memory. Addresses do not change from call to call.
struct MemoryPlan {
  at::Tensor memory;  // the visiting blocks, bytes
  Gathering gathering;
  std::vector<Copy> copies;  // [W - 1]; none where a kernel brings the blocks
  std::shared_ptr<const std::vector<int64_t>> step_of_rank;
};

/// k or v [B, S_r, H_kv, D] for the staging kernel. `x` must be stageable.
cuda::StageSource stage_source(const at::Tensor& x);
/// x itself, or a copy where its rows are not whole aligned pieces of memory.
at::Tensor stageable(const at::Tensor& x);

/// What distinguishes one kind of call from another.
std::vector<int64_t> plan_key(const Exchange& exchange);

/// Memory for visiting blocks: up to depth + 1 at a time.
int64_t gathered_bytes(const Exchange& exchange);

/// `gathered`: at least gathered_bytes(). For a kernel, sources in place of copies.
std::unique_ptr<MemoryPlan> plan_memory(const Exchange& exchange, const SharedMemory& staged,
                                        const at::Tensor& gathered, const Handshake& handshake);

}  // namespace ringattn
