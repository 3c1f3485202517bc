// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/export.h"
#include "core/shape.h"
#include "peer_sync/protocol.h"

// How key/value blocks travel. The ring loop sees Transport and BlockStream and nothing below them.

namespace ringattn {

/// What this rank gives and gets at one step of the schedule (step 1 .. W-1; step 0 is its own
/// block).
struct Hop {
  int64_t destination = 0;  // the rank that my block visits
  int64_t source = 0;       // the rank whose block visits me
  int64_t rows_sent = 0;    // leading rows of my block that it sees; 0: nothing is sent
  int64_t rows_received = 0;
  int64_t source_rows = 0;  // of the whole block
};

/// One rank's part in a ring call.
struct Exchange {
  int64_t call = 0;  // number of the call in its group
  at::Tensor k;      // [B, S_r, H_kv, D]
  at::Tensor v;
  std::vector<Hop> hops;  // [W - 1]; hops[i] belongs to step i + 1
  int64_t most_rows = 0;  // of any rank's block
  int64_t depth = 1;      // blocks that may be in flight or waiting ahead of the one being attended
  bool by_kernel = false;  // one kernel attends to all blocks and brings them by itself, if it can
  bool timed = false;      // record how long transfers take
};

/// A visiting block.
struct Block {
  at::Tensor k;  // [B, rows_received, H_kv, D], any strides
  at::Tensor v;
};

/// All visiting blocks of a call in memory that holds them at once, each where it will arrive.
struct Gathering {
  std::vector<Block> blocks;  // [W - 1]; blocks[i] visits at step i + 1

  // Where the kernel brings them by itself (Exchange::by_kernel); otherwise empty.
  std::vector<RemoteKeys> sources;  // [W - 1]
  Bringing bringing;
};

/// The blocks of the other ranks, arriving in schedule order.
///
/// One thread calls wait(1), release(1), wait(2), ... and finish() at the end. On CUDA nothing here
/// blocks the host: "ready" and "done with" are orders on the current stream.
class RINGATTN_API BlockStream {
 public:
  virtual ~BlockStream() = default;

  /// The block of `step`, ready for the current stream (CUDA) or for this thread (CPU). Throws when
  /// the source is gone or late.
  virtual Block wait(int64_t step) = 0;
  /// Where every block has a place of its own: all of them. What has sources is not waited for
  /// here.
  virtual const Gathering* gathering() const { return nullptr; }
  /// What reads the block of `step` has been launched: its memory may be filled again. Step 0 is
  /// this rank's own block.
  virtual void release(int64_t step) = 0;
  /// All blocks have been waited for. `results` were computed from them: should a transfer fail
  /// after the call has returned, they are filled with NaN.
  virtual void finish(const std::vector<at::Tensor>& results) = 0;
  /// How long the block of `step` was on its way; after the stream has been synchronised.
  virtual double transfer_ms(int64_t step) = 0;
};

/// A way to move blocks between the ranks of one group.
class RINGATTN_API Transport {
 public:
  virtual ~Transport() = default;
  virtual std::unique_ptr<BlockStream> open(const Exchange& exchange) = 0;
};

}  // namespace ringattn
