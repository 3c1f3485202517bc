// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "transport/p2p_transport.h"

namespace ringattn {
namespace {

// Wire format of a block: [rows, 2, B, H_kv, D], keys and values interleaved by row, so that any
// range of rows is contiguous. The block of the leading `rows`: one view each.
Block from_wire(const at::Tensor& wire, int64_t rows) {
  const auto part = [&](int64_t index) {
    return wire.as_strided({wire.size(2), rows, wire.size(3), wire.size(4)},
                           {wire.stride(2), wire.stride(0), wire.stride(3), wire.stride(4)},
                           wire.storage_offset() + index * wire.stride(1));
  };
  return {part(0), part(1)};
}

at::Tensor to_wire(const at::Tensor& k, const at::Tensor& v, const RowRange& rows) {
  at::Tensor wire = at::empty({rows.size(), 2, k.size(0), k.size(2), k.size(3)}, k.options());
  const Block staged = from_wire(wire, rows.size());
  staged.k.copy_(k.narrow(1, rows.begin, rows.size()));
  staged.v.copy_(v.narrow(1, rows.begin, rows.size()));
  return wire;
}

class MessageStream : public BlockStream {
 public:
  MessageStream(MessageTransport& transport, const RingExchangePlan& exchange)
      : transport_(transport),
        exchange_(exchange),
        sent_(rows_sent(exchange.hops)),
        transfers_(exchange.hops.size()) {
    if (!sent_.empty()) own_block_ = to_wire(exchange_.k, exchange_.v, sent_);
    exchange_.k.reset();
    exchange_.v.reset();

    for (const int64_t rows : buffer_rows(exchange_.hops, exchange_.depth)) {
      buffers_.push_back(
          at::empty({rows, 2, exchange.k.size(0), exchange.k.size(2), exchange.k.size(3)},
                    exchange.k.options()));
    }
    start(1, exchange_.depth);
    if (transport_.tags_messages()) exchange_tags();
  }

  Block wait(int64_t step) override {
    if (transfers_[step - 1]) transfers_[step - 1]->wait();
    return resident_ ? resident_->blocks[step - 1] : block(step);
  }

  const ResidentBlocks* resident_blocks() const override { return resident_.get(); }

  void release(int64_t step) override {
    const int64_t next = step + exchange_.depth + 1;
    start(next, next);
  }

  void finish(const std::vector<at::Tensor>& results) override {
    for (const auto& transfer : transfers_) {
      if (transfer) transfer->finish();
    }
    for (const auto& tag : tags_) tag->finish();
    transport_.guard(results);
    own_block_.reset();  // timings outlive the call, its tensors do not
    buffers_.clear();
    resident_.reset();
  }

  double transfer_ms(int64_t step) override {
    return transfers_[step - 1] ? transfers_[step - 1]->elapsed_ms() : 0.0;
  }

 private:
  int64_t num_hops() const { return static_cast<int64_t>(exchange_.hops.size()); }
  const at::Tensor& buffer_of(int64_t step) const { return buffers_[(step - 1) % buffers_.size()]; }
  Block block(int64_t step) const {
    return from_wire(buffer_of(step), exchange_.hops[step - 1].received.size());
  }

  // What travels at the steps first .. last.
  void start(int64_t first, int64_t last) {
    std::vector<int64_t> steps;
    std::vector<Message> messages;
    last = std::min(last, num_hops());
    for (int64_t step = first; step <= last; ++step) {
      const HopPlan& hop = exchange_.hops[step - 1];
      if (hop.sent.empty() && hop.received.empty()) continue;
      steps.push_back(step);
      messages.push_back(message(step));
    }
    auto transfers = transport_.start_all(messages);
    for (size_t i = 0; i < steps.size(); ++i) transfers_[steps[i] - 1] = std::move(transfers[i]);
    // Blocks that come together may be attended together.
    if (first == 1 && last == num_hops() && transport_.starts_as_one(messages)) {
      resident_ = std::make_unique<ResidentBlocks>();
      for (int64_t step = 1; step <= last; ++step) resident_->blocks.push_back(block(step));
    }
  }

  Message message(int64_t step) const {
    const HopPlan& hop = exchange_.hops[step - 1];
    Message message;
    message.call = exchange_.call;
    message.step = step;
    message.timed = exchange_.timed;
    message.destination = hop.destination;
    message.source = hop.source;
    if (!hop.sent.empty()) message.send = own_rows(hop.sent);
    if (!hop.received.empty()) {
      message.receive = buffer_of(step).narrow(0, 0, hop.received.size());
    }
    return message;
  }

  // With each rank that neither sends rows to this one nor receives any.
  void exchange_tags() {
    const auto& hops = exchange_.hops;
    for (const HopPlan& hop : hops) {
      const bool sends = std::any_of(hops.begin(), hops.end(), [&](const HopPlan& other) {
        return other.destination == hop.source && !other.sent.empty();
      });
      if (sends || !hop.received.empty()) continue;
      Message message;
      message.call = exchange_.call;
      message.destination = message.source = hop.source;
      message.send = at::zeros({1}, at::kByte);
      message.receive = at::empty({1}, at::kByte);
      tags_.push_back(transport_.start(message));
    }
  }

  // One behind the other: without gaps it is a view.
  at::Tensor own_rows(const RowSet& rows) const {
    std::vector<at::Tensor> parts;
    for (const RowRange& range : rows.ranges()) {
      parts.push_back(own_block_.narrow(0, range.begin - sent_.begin, range.size()));
    }
    return parts.size() == 1 ? parts[0] : at::cat(parts);
  }

  MessageTransport& transport_;
  RingExchangePlan exchange_;
  RowRange sent_;                    // of this rank's block, from the first row that peers see
  at::Tensor own_block_;             // [rows, 2, B, H_kv, D], these rows
  std::vector<at::Tensor> buffers_;  // [rows, 2, B, H_kv, D] each, received blocks in rotation
  std::unique_ptr<ResidentBlocks> resident_;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // [W - 1]; null: nothing travels
  std::vector<std::unique_ptr<Transfer>> tags_;
};

}  // namespace

std::unique_ptr<BlockStream> MessageTransport::open(const RingExchangePlan& exchange) {
  return std::make_unique<MessageStream>(*this, exchange);
}

}  // namespace ringattn
