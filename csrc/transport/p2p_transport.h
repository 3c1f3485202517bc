// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <vector>

#include "peer_sync/partial_exchange.h"
#include "transport/transport.h"

namespace ringattn {

/// One message out and one in. Either tensor may be undefined: nothing goes that way.
struct Message {
  int64_t call = 0;
  int64_t step = 0;
  bool returns = false;  // the step's second message, which goes the other way
  at::Tensor send;       // contiguous
  int64_t destination = 0;
  at::Tensor receive;  // contiguous
  int64_t source = 0;
  int64_t largest = 0;  // bytes of the largest `send` of any rank
  bool timed = false;
};

/// A message in flight. It keeps both tensors alive for as long as something reads or writes them.
class RINGATTN_API Transfer {
 public:
  virtual ~Transfer() = default;
  /// `receive` is filled, for the current stream (CUDA) or for this thread (CPU). May be called
  /// again.
  virtual void wait() = 0;
  /// This thread has nothing left to do for this transfer; on CPU, `send` has been sent.
  virtual void finish() = 0;
  /// From the start to the end of a timed transfer; 0 for others.
  virtual double elapsed_ms() = 0;
};

/// Messages of one rank, each sent as soon as it is there, while others are still to be made. All
/// ranks start their messages in order. In a round, a rank gets at most one message of each other.
class RINGATTN_API MessageRound {
 public:
  virtual ~MessageRound() = default;
  /// Starts message `i` and returns at once, as MessageTransport::start. Called for each message,
  /// also where it has nothing to send or receive.
  virtual void start(int64_t i) = 0;
  /// Its `receive` is filled, as Transfer::wait.
  virtual void wait_received(int64_t i) = 0;
  /// After the last of these. Work of the current stream, or of this thread, may write what was
  /// sent once the next round or call has been opened.
  virtual void finish() = 0;
};

class CollectiveTransport;

/// A transport that moves single messages, too. The two-sided ones share block streams, staging and
/// buffers (p2p_block_stream.cpp); they differ in how one message moves.
class RINGATTN_API MessageTransport : public Transport {
 public:
  std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) override;

  /// Starts a message and returns at once. On CUDA it reads `send` and writes `receive` after the
  /// work that the current stream holds now.
  virtual std::unique_ptr<Transfer> start(const Message& message) = 0;
  /// start() of each, to and from different ranks.
  virtual std::vector<std::unique_ptr<Transfer>> start_all(const std::vector<Message>& messages);
  /// Whether start_all() starts these as one, which takes less time for all of them, and more for
  /// the first: they arrive together.
  virtual bool starts_as_one(const std::vector<Message>& messages) const { return false; }
  /// Memory for the messages [i] that a round sends, [numel[i]] each, at most `largest` bytes on
  /// any rank. All rounds of a call use it again. By all ranks, before open().
  virtual std::vector<at::Tensor> message_buffers(const std::vector<int64_t>& numel,
                                                  int64_t largest,
                                                  const at::TensorOptions& options);
  /// `messages` must not be empty; each `send` begins where its buffer does.
  virtual std::unique_ptr<MessageRound> open_round(std::vector<Message> messages);
  /// Whether a round's messages are signalled by kernels of another stream, which come late where
  /// kernels that run meanwhile leave no multiprocessor.
  virtual bool signals_by_kernel() const { return false; }
  /// Whether a rank without a message to send or receive must start one all the same.
  virtual bool needs_every_rank() const { return false; }
  /// Whether ranks compare calls by the tags of their messages: then two ranks between which no row
  /// travels exchange a byte in each call.
  virtual bool tags_messages() const { return false; }
  /// Whether, on CUDA, ranks compare the tag of a call (CallMonitor::call_tag) before anything
  /// else, where no rank sends more than `bytes` at once, or `buffered` bytes in a round.
  virtual bool compares_tags(int64_t bytes, int64_t buffered) const { return false; }
  /// Whether kernels of all ranks can exchange a partial result of `bytes` of each rank by
  /// themselves. The same on every rank.
  virtual bool exchanges_partials(int64_t bytes) const { return false; }
  /// By all ranks, where they can: `launch` launches the kernel on the current stream. Its results
  /// need no guard().
  virtual void exchange_partials(int64_t call,
                                 c10::function_ref<void(const PartialExchange&)> launch) {
    TORCH_INTERNAL_ASSERT(false, "the transport exchanges no partials");
  }
  /// Around the replay of captured calls on the current stream, where the transport cannot see it:
  /// it is ordered, and waited for, as a call is.
  virtual void begin_replay() {}
  virtual void end_replay() {}
  /// This transport, where its library has collectives too; null otherwise.
  virtual CollectiveTransport* collectives() { return nullptr; }
  /// Whether its messages can be part of a CUDA graph.
  virtual bool can_be_captured() const { return true; }
  /// Fills `results` with NaN if a message that they depend on fails after the host has moved on.
  virtual void guard(const std::vector<at::Tensor>& results) {}
  /// Blocks until every message is done or has been given up.
  virtual void synchronize() {}
  /// Whether nothing uses its memory any more. Polled once the group is gone.
  virtual bool idle() { return true; }
};

/// A transport whose library has collectives too.
class RINGATTN_API CollectiveTransport : public MessageTransport {
 public:
  CollectiveTransport* collectives() final { return this; }
  /// mine [N] of every rank -> [W, N], the same bits on every rank, ready for the current stream.
  virtual at::Tensor all_gather(const at::Tensor& mine, int64_t call) = 0;
};

}  // namespace ringattn
