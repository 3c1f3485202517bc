// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "core/environment.h"
#include "transport/runtime/cuda_event_transfer.h"
#include "transport/symmetric/kernels/fetch.h"
#include "transport/symmetric/kernels/stage.h"
#include "transport/symmetric/transport.h"

namespace ringattn {

using at::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;

namespace {

// Bytes of a message. Alone, a kernel is faster than copy engines up to 16 MB (H200; 104 against
// 119 us). But copy engines need no multiprocessors, and another kernel that runs beside the
// message may leave one of them to it: a kernel fetches what one alone can in little time.
constexpr int64_t kMaxFetchedByKernel = int64_t{1} << 20;

}  // namespace

std::unique_ptr<Transfer> SymmetricTransport::start(const Message& message) {
  const CUDAStream stream = getCurrentCUDAStream();
  const bool kernel_fetches =
      environment().kernels_may_wait && message.largest <= kMaxFetchedByKernel;
  // A kernel that waits for peers is beside the work of the current stream. One that stages alone
  // comes before that: its thread blocks would find no place beside those of a long kernel.
  if (kernel_fetches) after(stream);
  const CUDAStream staging = kernel_fetches ? side_stream_ : stream;
  calls_.begin_on(staging);
  reserve(staged_, message.largest);

  const auto started = new_event(message.timed), done = new_event(message.timed);
  if (message.timed) started->record(staging);
  cuda::StageParams params;
  params.staged = staged_by(rendezvous_.rank);
  if (message.send.defined()) {
    // One row of bytes. Its last vector may reach past its end: allocations are of 512 bytes.
    params.k.data = message.send.const_data_ptr();
    params.keys_only = true;
    params.rows = params.staged_rows = 1;
    params.row_bytes = static_cast<int64_t>(message.send.nbytes());
  }
  params.kernel_fetches = kernel_fetches;
  if (kernel_fetches) cuda::load_fetch();
  stage(params, message.call,
        std::make_shared<std::vector<int64_t>>(rendezvous_.size, message.step), staging);
  if (kernel_fetches) {
    fetch_by_kernel(message);
  } else {
    after(stream);
    fetch_by_copy_engine(message);
  }
  done->record(side_stream_);
  calls_.end_on(side_stream_);
  return std::make_unique<HoldingTransfer>(message, started, done, side_stream_);
}

void SymmetricTransport::fetch_by_kernel(const Message& message) {
  cuda::FetchParams params;
  if (message.receive.defined()) {
    params.from = staged_by(message.source);
    params.to = message.receive.mutable_data_ptr();
    params.bytes = static_cast<int64_t>(message.receive.nbytes());
  }
  params.remote_fetch = signal_pad_.remote_fetch(/*num_kv_heads=*/1);
  params.remote_fetch.delay_seed = delays_.seed();
  C10_CUDA_CHECK(cuda::fetch(params, side_stream_));
}

void SymmetricTransport::fetch_by_copy_engine(const Message& message) {
  signal_pad_.enqueue_wait_and_clear_staged(rendezvous_.calls->call_tag(), side_stream_);
  if (message.receive.defined()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(message.receive.mutable_data_ptr(), staged_by(message.source),
                                   message.receive.nbytes(), cudaMemcpyDefault, side_stream_));
  }
  // The size of the largest message is the same on every rank: copy engines fetch on all of them,
  // unless the environment keeps kernels from waiting on this one alone.
  const auto by =
      message.largest > kMaxFetchedByKernel ? Fetching::kByStreamOnAllRanks : Fetching::kByStream;
  signal_pad_.enqueue_signal_read(rendezvous_.others(), by, side_stream_);
  signal_pad_.enqueue_wait_until_read(by, side_stream_);
}

// ---- rounds -------------------------------------------------------------------------------------

std::vector<at::Tensor> SymmetricTransport::message_buffers(const std::vector<int64_t>& numel,
                                                            int64_t largest,
                                                            const at::TensorOptions& options) {
  calls_.begin_on(getCurrentCUDAStream());
  reserve(buffered_, static_cast<int64_t>(numel.size()) * largest);
  std::vector<at::Tensor> buffers;
  for (size_t i = 0; i < numel.size(); ++i) {
    char* const memory = static_cast<char*>(buffered_->of(rendezvous_.rank)) + i * largest;
    buffers.push_back(at::from_blob(memory, {numel[i]}, options));
  }
  return buffers;
}

// A staging kernel for each message, which copies nothing and signals to its destination, on a
// stream that waits for what has written the message: the caller's next kernel does not wait for
// it. The side stream waits for each source by itself.
class SymmetricRound : public MessageRound {
 public:
  SymmetricRound(SymmetricTransport& transport, std::vector<Message> messages)
      : transport_(transport),
        messages_(std::move(messages)),
        stream_(getCurrentCUDAStream()),
        received_(messages_.size()) {
    transport_.calls_.begin_on(stream_);  // before the caller writes what it sends
  }

  // Enqueued work of a failed call runs all the same: the next call is ordered after it.
  ~SymmetricRound() override {
    if (!begun_) return;
    try {
      transport_.order(transport_.signal_stream_, stream_);
      transport_.calls_.end_on(stream_);
      for (const Message& message : messages_) {
        if (message.receive.defined()) message.receive.record_stream(transport_.side_stream_);
      }
    } catch (const std::exception&) {
      return;  // the device is lost: nothing runs on it
    }
  }
  SymmetricRound(const SymmetricRound&) = delete;
  SymmetricRound& operator=(const SymmetricRound&) = delete;

  void start(int64_t i) override {
    if (i == 0) begin();
    signal_staged(i);
    // Waits are enqueued behind the signals of the same step: where streams share a queue, ranks
    // get on step by step.
    receive(i);
    if (i + 1 == static_cast<int64_t>(messages_.size())) end();
  }

  void wait_received(int64_t i) override { received_[i].block(getCurrentCUDAStream()); }

  // The next round or call waits until peers have read, not the work of the caller before that:
  // nothing of the caller's is left. But a replay, which the transport does not see, waits for
  // nothing.
  void finish() override {
    if (transport_.calls_.captured()) {
      transport_.join(stream_);
      transport_.calls_.end_on(stream_);
    } else {
      all_received_.block(stream_);
      transport_.calls_.end_on(transport_.side_stream_);
    }
    messages_.clear();
    begun_ = false;
  }

 private:
  const Rendezvous& group() const { return transport_.rendezvous_; }

  void begin() {
    begun_ = true;
    auto steps = std::make_shared<std::vector<int64_t>>(group().size, messages_.front().step);
    for (const Message& message : messages_) (*steps)[message.source] = message.step;
    transport_.signal_pad_.describe(messages_.front().call, std::move(steps),
                                    transport_.calls_.capturing());
    // What is received lies in memory of the caller's stream.
    transport_.after(stream_);
  }

  // Every rank signals to each peer once: to those that get no message in this round, at once.
  std::vector<int64_t> peers_of(int64_t i) const {
    std::vector<int64_t> peers = {messages_[i].destination};
    if (i > 0) return peers;
    for (const int64_t rank : group().others()) {
      const auto gets = [&](const Message& message) { return message.destination == rank; };
      if (std::none_of(messages_.begin(), messages_.end(), gets)) peers.push_back(rank);
    }
    return peers;
  }

  void signal_staged(int64_t i) {
    cuda::StageParams params;
    transport_.signal_pad_.add_signals(params, group().calls->call_tag(), peers_of(i));
    transport_.order(getCurrentCUDAStream(), transport_.signal_stream_);
    C10_CUDA_CHECK(cuda::signal_staged(params, transport_.signal_stream_));
  }

  void receive(int64_t i) {
    const Message& message = messages_[i];
    const CUDAStream stream = transport_.side_stream_;
    if (message.receive.defined()) {
      transport_.signal_pad_.enqueue_wait_staged({message.source}, group().calls->call_tag(),
                                                 stream);
      const char* const from =
          static_cast<const char*>(transport_.buffered_->of(message.source)) + i * message.largest;
      transport_.delays_.occupy_copy_engine(from, message.largest, stream);
      C10_CUDA_CHECK(cudaMemcpyAsync(message.receive.mutable_data_ptr(), from,
                                     message.receive.nbytes(), cudaMemcpyDefault, stream));
    }
    received_[i].record(stream);
  }

  void end() {
    const CUDAStream stream = transport_.side_stream_;
    transport_.signal_pad_.enqueue_wait_and_clear_staged(group().calls->call_tag(), stream);
    transport_.signal_pad_.enqueue_copy_given_up(stream);
    all_received_.record(stream);
    transport_.signal_pad_.enqueue_signal_read(group().others(), Fetching::kByStreamOnAllRanks,
                                               stream);
    // The last staging kernel has cleared the signals that the stream waits for now.
    transport_.after(transport_.signal_stream_);
    transport_.signal_pad_.enqueue_wait_until_read(Fetching::kByStreamOnAllRanks, stream);
  }

  SymmetricTransport& transport_;
  std::vector<Message> messages_;
  CUDAStream stream_;
  std::vector<CUDAEvent> received_;
  CUDAEvent all_received_;
  bool begun_ = false;
};

std::unique_ptr<MessageRound> SymmetricTransport::open_round(std::vector<Message> messages) {
  return std::make_unique<SymmetricRound>(*this, std::move(messages));
}

}  // namespace ringattn
