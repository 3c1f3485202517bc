// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/cuda/stage.h"

namespace ringattn {

class RingGroup;

/// How the ranks of a one-sided transport keep out of each other's way: words in shared memory,
/// each 0 or 1, which one rank sets and another one waits for and takes back; and one count.
///
///   staged[p] of rank r:   what p has staged may be read by r     p sets it, r takes it back
///   read[p] of rank r:     p has read what r staged last          p sets it, r takes it back
///   num_staged of rank r:  others that have staged                they count, r takes W - 1 off
///
/// r takes staged[p] back as soon as it has seen it, before anything that tells p to go on: p
/// cannot have set it for the next call yet.
///
/// num_staged is for another stream of r's, which waits until it is W - 1 or more. p counts itself
/// for the next call only after r has told it to go on, so it says that r's copies wait for nobody.
/// r takes its due off when it stages the next time, by subtraction: others may have counted
/// themselves for that call before.
///
/// Every rank signals every other one in each call, and a call ends for its stream when everybody
/// has read what this rank staged: whatever stages next, a replay of a captured call too, need not
/// ask. Nothing in it counts calls: what is captured in a CUDA graph can be replayed. Waiting is
/// done by streams, for staging before any kernel that waits itself is launched, so no rank ever
/// waits for another one's multiprocessors while it holds its own.
class Handshake {
 public:
  /// Collective. Throws on all ranks where they do not share memory.
  Handshake(RingGroup& group, c10::Device device);
  ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  /// Whether a kernel may wait for what is copied: ranks count themselves, which takes atomics over
  /// their links, and no two of them share a device, where copies may take multiprocessors.
  bool kernels_may_wait() const;

  // One call: the staging kernel, then, on a stream that follows it, all but the first and the
  // third of these, in this order. The call's own stream goes on after the last.
  /// Completes what the staging kernel is told: it gives the signals.
  void give_signals(cuda::StageParams& params) const;
  /// Everything that the other ranks have for this call is in place.
  void take_staged(cudaStream_t stream);
  /// The same, for a stream whose kernel will wait until it has been copied. Enqueued after
  /// take_staged; only where kernels_may_wait().
  void wait_until_staged(cudaStream_t stream);
  /// This rank needs nothing more of what `other` has staged. Once for every other rank, behind
  /// what was copied from there.
  void tell_read(int64_t other, cudaStream_t stream);
  /// Nobody reads any more what this rank has staged.
  void wait_until_read(cudaStream_t stream);

  /// Words of this rank alone, 0 between calls: counters for a kernel, then words for what has
  /// arrived.
  uint32_t* launch_words() const;
  static constexpr int64_t kLaunchCounters = 2;
  static constexpr int64_t kMaxArrivals = 4096;
  /// Device memory, not 0 once this group's waits have been given up.
  const uint32_t* failed() const;

  /// Whether the other ranks have read everything that this one has staged, or will not any more.
  bool all_read();

  /// For errors: the number of the latest call, and the step at which the block of each rank visits
  /// in it.
  void describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank);

 private:
  class State;
  std::shared_ptr<State> state_;  // shared with the watchdog
};

}  // namespace ringattn
