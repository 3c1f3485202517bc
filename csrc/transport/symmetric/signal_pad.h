// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "peer_sync/protocol.h"
#include "transport/symmetric/kernels/stage.h"

namespace ringattn {

class RingGroup;
class SignalWatch;

/// How the ranks of a one-sided transport keep out of each other's way: words in shared memory,
/// which one rank sets and another one waits for and takes back, to 0.
///
///   staged[p] of rank r:   how much of what p stages may be read by r (protocol.h)
///                                                                 p sets it, r takes it back
///   read[p] of rank r:     1: p has read what r staged last       p sets it, r takes it back
///   tag[p] of rank r:      what kind of call p stages for         p sets it, before staged[p]
///
/// The first two are there twice: in device memory for kernels, and in host memory for streams,
/// which wait where copy engines fetch (host_signal_pad.h; there staged[p] is the tag, set when all
/// is staged). Nobody knows which of them another rank waits for, so both are set and taken back in
/// each call, `staged` in device memory first, `read` in host memory. Who waits for the one that is
/// set later knows both to be there; who waits for the other one waits for both before it takes any
/// back: the kernel that has read all, and the next staging kernel.
///
/// r takes staged[p] back when p has staged everything, before it tells p to go on: p cannot have
/// set it for the next call yet.
///
/// Every rank signals every other one in each call, and a call ends for its stream when everybody
/// has read what this rank staged: whatever stages next, a replay of a captured call too, need not
/// ask. Nothing in it counts calls: what is captured in a CUDA graph can be replayed. Waiting for
/// what others have yet to begin is done by streams, or by the last thread block of a kernel (and
/// the one that shares its keys), so no rank ever waits for another one's multiprocessors while it
/// holds more than two of its own.
class Handshake {
 public:
  /// Collective. Throws on all ranks where they do not share memory.
  Handshake(RingGroup& group, c10::Device device);
  ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  // One call begins with the staging kernel.
  /// Completes what that kernel is told, `kernel_fetches` being set: it gives the signals. Where a
  /// kernel fetches, that one begins when all others are staging. Ranks in calls of other kinds
  /// fail (Agreement::kind).
  void give_signals(cuda::StageParams& params, int32_t kind) const;

  // Then, where copy engines fetch, on a stream that follows it, in this order:
  /// Everything that the other ranks have for this call is in place.
  void wait_until_staged(int32_t kind, cudaStream_t stream);
  /// This rank needs nothing more of what `other` has staged. Once for every other rank, behind
  /// what was copied from there.
  void tell_read(int64_t other, cudaStream_t stream);
  /// Nobody reads any more what this rank has staged.
  void wait_until_read(cudaStream_t stream);
  /// Behind that: NaN where this group's calls come to nothing.
  void poison_if_failed(const std::vector<at::Tensor>& results) const;

  // And where a kernel fetches:
  /// What it needs; it takes back, tells, waits and shows by itself.
  Bringing bringing(int64_t num_kv_heads) const;

  /// Whether the other ranks have read everything that this one has staged, or will not any more.
  bool all_read();

  /// What is known of ranks in other calls has the group fail now, not a little later.
  void notice();

  /// For errors: the number of the latest call, and the step at which the block of each rank visits
  /// in it.
  void describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank);

 private:
  class Words;
  std::shared_ptr<Words> words_;        // both shared with the watchdog
  std::shared_ptr<SignalWatch> watch_;  // over waits for these
};

}  // namespace ringattn
