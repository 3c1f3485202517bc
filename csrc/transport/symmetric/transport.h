// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "transport/group/rendezvous.h"
#include "transport/p2p_transport.h"
#include "transport/symmetric/buffer_layout.h"
#include "transport/symmetric/capture_aware_order.h"
#include "transport/symmetric/peer_device_memory.h"
#include "transport/symmetric/signal_pad.h"
#include "transport/symmetric/transfer_delays.h"

namespace ringattn {

// One-sided, between devices of one host: every rank stages its block in memory that all ranks can
// read. The attention kernel of a reader, or its copy engines, copy it to local memory. Making one
// is collective; it throws on all ranks where they do not share memory.
class SymmetricTransport : public MessageTransport {
 public:
  SymmetricTransport(const Rendezvous& rendezvous, c10::Device device);
  ~SymmetricTransport() override;

  std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) override;
  std::unique_ptr<Transfer> start(const Message& message) override;
  std::vector<at::Tensor> message_buffers(const std::vector<int64_t>& numel, int64_t largest,
                                          const at::TensorOptions& options) override;
  std::unique_ptr<MessageRound> open_round(std::vector<Message> messages) override;

  bool signals_by_kernel() const override { return true; }
  bool needs_every_rank() const override { return true; }
  // More memory is a collective exchange that comes before.
  bool compares_tags(int64_t staged, int64_t buffered) const override {
    return has(staged_, staged) && (buffered == 0 || has(buffered_, buffered));
  }

  bool exchanges_partials(int64_t bytes) const override {
    return bytes <= kMaxPartialBytes && signal_pad_.kernels_may_wait();
  }
  void exchange_partials(int64_t call,
                         c10::function_ref<void(const PartialExchange&)> launch) override;
  void begin_replay() override { calls_.begin_on(c10::cuda::getCurrentCUDAStream()); }
  void end_replay() override { calls_.end_on(c10::cuda::getCurrentCUDAStream()); }

  void guard(const std::vector<at::Tensor>& results) override {
    signal_pad_.poison_if_failed(results);
  }

  void synchronize() override;
  bool idle() override;

 private:
  friend class SymmetricStream;
  friend class SymmetricRound;
  using Steps = std::shared_ptr<const std::vector<int64_t>>;

  static bool has(const std::unique_ptr<PeerDeviceMemory>& memory, int64_t bytes) {
    return memory && memory->bytes() >= static_cast<size_t>(bytes);
  }
  char* staged_by(int64_t rank) const { return static_cast<char*>(staged_->of(rank)); }

  // Later work of `later` waits for the present work of `stream`.
  void order(c10::cuda::CUDAStream stream, c10::cuda::CUDAStream later) {
    fork_.record(stream);
    fork_.block(later);
  }
  // As order(), of the side stream.
  void after(c10::cuda::CUDAStream stream) { order(stream, side_stream_); }
  // Later work of `stream` waits for the present work of the side stream. A capture, too, must end
  // with all streams that it has spread to joined to the first.
  void join(c10::cuda::CUDAStream stream) {
    join_.record(side_stream_);
    join_.block(stream);
  }

  // Collective: every rank has `bytes` of this memory.
  void reserve(std::unique_ptr<PeerDeviceMemory>& memory, int64_t bytes);
  void check_may_grow() const;
  // Captured calls go on using the memory that they were captured with.
  void forget_plans();

  void fetch_by_kernel(const Message& message);
  void fetch_by_copy_engine(const Message& message);
  MemoryPlan& plan(const RingExchangePlan& exchange);
  // On `stream`, for all peers.
  void stage(cuda::StageParams params, int64_t call, Steps step_of_rank, cudaStream_t stream);

  const Rendezvous rendezvous_;
  c10::Device device_;
  SignalPad signal_pad_;
  std::unique_ptr<PeerDeviceMemory> staged_;    // the block of each rank
  std::unique_ptr<PeerDeviceMemory> buffered_;  // message_buffers() of each rank
  at::Tensor fetched_;                          // blocks that this rank fetches, bytes
  std::map<std::vector<int64_t>, std::unique_ptr<MemoryPlan>> plans_;
  std::vector<std::unique_ptr<PeerDeviceMemory>> captured_memory_;
  std::vector<std::unique_ptr<MemoryPlan>> captured_plans_;
  // For copies of blocks, and for messages. One stream: copies from other devices share one
  // engine, and alternating streams cost more than they gain (H200: 0.27 against 0.30 ms for a ring
  // of 8192 tokens).
  c10::cuda::CUDAStream side_stream_;
  c10::cuda::CUDAStream signal_stream_;  // for the signals of a round
  at::cuda::CUDAEvent fork_, join_;
  CallOrder calls_;
  TransferDelays delays_;
};

}  // namespace ringattn
