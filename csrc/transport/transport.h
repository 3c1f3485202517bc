// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/export.h"
#include "core/hop_plan.h"
#include "core/shape.h"
#include "peer_sync/protocol.h"

// How blocks of keys and values move between ranks. The ring loop sees Transport and BlockStream,
// and nothing below them.

namespace ringattn {

/// What fetches from other ranks in a call.
enum class Fetching : int8_t {
  kByKernel,            // this rank's kernel that attends all blocks
  kByStream,            // copy engines of this rank; on other ranks possibly a kernel
  kByStreamOnAllRanks,  // copy engines on every rank, which spares copies of signals
};

/// One rank's part in a ring call.
struct RingExchangePlan {
  int64_t call = 0;  // number of the call in its group
  at::Tensor k;      // [B, S_r, H_kv, D]
  at::Tensor v;
  std::vector<HopPlan> hops;  // [W - 1]; hops[i] belongs to step i + 1
  // [W - 1], where a kernel fetches: RemoteBlock::parts, undefined for hops without gaps. The
  // current stream fills them.
  std::vector<at::Tensor> parts;
  int64_t max_rows = 0;  // of the blocks of all ranks
  int64_t depth = 1;     // blocks that may be in flight or waiting ahead of the one being attended
  Fetching fetching = Fetching::kByStream;  // over a one-sided transport
  bool timed = false;                       // record how long transfers take

  bool kernel_fetches() const { return fetching == Fetching::kByKernel; }
};

/// The block of another rank.
struct Block {
  at::Tensor k;  // [B, HopPlan::received, H_kv, D], any strides
  at::Tensor v;
};

/// All blocks of a call in memory that holds them at the same time.
struct ResidentBlocks {
  std::vector<Block> blocks;  // [W - 1]; blocks[i] belongs to step i + 1

  // Where the kernel fetches the blocks (RingExchangePlan::kernel_fetches); otherwise empty.
  std::vector<RemoteBlock> sources;  // [W - 1]
  RemoteFetch remote_fetch;
};

/// The blocks of the other ranks, arriving in the order of the schedule.
///
/// One thread calls wait(1), release(1), wait(2), ... and finish() at the end. On CUDA no function
/// blocks the host: they order work on the current stream.
///
/// Where one kernel fetches all blocks (RingExchangePlan::kernel_fetches), the caller enqueues
/// nothing on the stream between open() and that launch, which runs beside the kernel that stages
/// this rank's block: it depends on the latest kernel of the stream. The caller allocates nothing
/// either: an allocator may fill memory with a kernel, or give memory that is being staged.
class RINGATTN_API BlockStream {
 public:
  virtual ~BlockStream() = default;

  /// The block of `step`, which work on the current stream (CUDA) or of this thread (CPU) may read
  /// from now on. Throws where the source has failed or is late.
  virtual Block wait(int64_t step) = 0;
  /// All blocks, each in memory of its own, where they had better be attended together; null
  /// otherwise. Blocks with sources need no wait(). Valid until finish().
  virtual const ResidentBlocks* resident_blocks() const { return nullptr; }
  /// The work that reads the block of `step` has been launched: its memory may be reused after that
  /// work. Step 0 is this rank's own block.
  virtual void release(int64_t step) = 0;
  /// Called after the last block. `results` were computed from the blocks: if a transfer fails
  /// after the call has returned, they are filled with NaN.
  virtual void finish(const std::vector<at::Tensor>& results) = 0;
  /// How long the transfer of the block of `step` took; after the stream has been synchronised.
  virtual double transfer_ms(int64_t step) = 0;
};

/// A way to move blocks between the ranks of one group.
class RINGATTN_API Transport {
 public:
  virtual ~Transport() = default;
  virtual std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) = 0;
};

}  // namespace ringattn
