// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "peer_sync/partial_exchange.h"
#include "peer_sync/protocol.h"
#include "transport/symmetric/kernels/stage.h"
#include "transport/transport.h"

namespace ringattn {

struct Rendezvous;
class SignalWatchdog;

/// The signal pads of all ranks in device and in host memory, and how one rank uses them: the
/// protocol is in peer_sync/protocol.h, the host's pads in host_signal_pad.h.
class SignalPad {
 public:
  /// Collective. Throws on all ranks where they do not share memory.
  SignalPad(const Rendezvous& rendezvous, c10::Device device);
  ~SignalPad();
  SignalPad(const SignalPad&) = delete;
  SignalPad& operator=(const SignalPad&) = delete;

  // A call begins with the staging kernel.
  /// Completes its params, kernel_fetches being set, with the signals to and from `peers`. Ranks
  /// whose calls have another tag (CallMonitor::call_tag) fail.
  void add_signals(cuda::StageParams& params, int32_t call_tag,
                   const std::vector<int64_t>& peers) const;

  // Where copy engines fetch, next, in this order, on a stream that follows it. The stream waits
  // and writes, the host enqueues:
  /// Waits until `peers` have staged everything. In a round, ahead of what follows: the watchdog
  /// counts peers that the stream does not wait for yet as late, too.
  void enqueue_wait_staged(const std::vector<int64_t>& peers, int32_t call_tag,
                           cudaStream_t stream);
  /// Waits until all peers have staged everything for this call, and clears their signals.
  void enqueue_wait_and_clear_staged(int32_t call_tag, cudaStream_t stream);
  /// Signals that this rank has read the blocks of `peers`. Once for each peer, after the copies
  /// from there.
  void enqueue_signal_read(const std::vector<int64_t>& peers, Fetching by, cudaStream_t stream);
  /// Waits until all peers have read this rank's block.
  void enqueue_wait_until_read(Fetching by, cudaStream_t stream);
  /// What poison_if_failed reads of waits before. Part of enqueue_wait_until_read().
  void enqueue_copy_given_up(cudaStream_t stream);
  /// After that: fills `results` with NaN where the group's calls have failed.
  void poison_if_failed(const std::vector<at::Tensor>& results) const;

  // Where a kernel fetches, next:
  /// Parameters of a fetching kernel, which waits, clears and signals by itself.
  RemoteFetch remote_fetch(int64_t num_kv_heads) const;

  /// Whether kernels of every rank may wait, as those that exchange partials do
  /// (RINGATTN_KERNEL_WAITS of all ranks, when the pad was made).
  bool kernels_may_wait() const;
  /// What the kernel of an exchange needs (peer_sync/partial_exchange.h).
  PartialExchange partial_exchange(int32_t call_tag) const;

  /// Whether all peers have read what this rank has staged, or will not any more.
  bool all_read();

  /// Ends the group now, not at the watchdog's next poll, where a mismatch has been detected.
  void check_mismatch();

  /// As SignalWatchdog's.
  void describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank,
                bool captured);

 private:
  class Signals;
  std::shared_ptr<Signals> signals_;          // shared with the watchdog
  std::shared_ptr<SignalWatchdog> watchdog_;  // over waits for these
};

}  // namespace ringattn
