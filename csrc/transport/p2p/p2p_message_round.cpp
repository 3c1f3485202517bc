// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>

#include <utility>

#include "transport/p2p_transport.h"

namespace ringattn {
namespace {

class TransferRound : public MessageRound {
 public:
  TransferRound(MessageTransport& transport, std::vector<Message> messages)
      : transport_(transport), messages_(std::move(messages)), transfers_(messages_.size()) {}

  void start(int64_t i) override {
    const Message& message = messages_[i];
    if (message.send.defined() || message.receive.defined()) {
      transfers_[i] = transport_.start(message);
    }
  }

  void wait_received(int64_t i) override {
    if (transfers_[i]) transfers_[i]->wait();
  }

  void finish() override {
    for (const auto& transfer : transfers_) {
      if (!transfer) continue;
      transfer->wait();
      transfer->finish();
    }
  }

 private:
  MessageTransport& transport_;
  std::vector<Message> messages_;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // null: nothing travels
};

}  // namespace

std::vector<std::unique_ptr<Transfer>> MessageTransport::start_all(
    const std::vector<Message>& messages) {
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (const Message& message : messages) transfers.push_back(start(message));
  return transfers;
}

std::vector<at::Tensor> MessageTransport::message_buffers(const std::vector<int64_t>& numel,
                                                          int64_t largest,
                                                          const at::TensorOptions& options) {
  std::vector<at::Tensor> buffers;
  for (const int64_t elements : numel) buffers.push_back(at::empty({elements}, options));
  return buffers;
}

std::unique_ptr<MessageRound> MessageTransport::open_round(std::vector<Message> messages) {
  return std::make_unique<TransferRound>(*this, std::move(messages));
}

}  // namespace ringattn
