// SPDX-License-Identifier: Apache-2.0
#include "ring/gradient_return.h"

#include <ATen/ops/empty.h>

namespace ringattn {

GradientReturn::GradientReturn(MessageTransport& transport, const RingCall& call,
                               const at::Tensor& own)
    : transport_(transport),
      call_(call),
      own_(own),
      received_(call.plan.hops.size()),
      transfers_(call.plan.hops.size()) {}

at::Tensor GradientReturn::gradients(int64_t rows) const {
  auto sizes = own_.sizes().vec();
  sizes[2] = rows;
  return at::empty(sizes, own_.options());
}

at::Tensor GradientReturn::visiting(int64_t step) const {
  return gradients(call_.plan.hops[step - 1].received.size());
}

void GradientReturn::send(int64_t step, const at::Tensor& visiting) {
  const HopPlan& hop = call_.plan.hops[step - 1];
  Message message;
  message.call = call_.number;
  message.step = step;
  message.returns = true;
  message.destination = hop.source;
  message.source = hop.destination;
  const int64_t row_elements = 2 * own_.size(1) * own_.size(3) * own_.size(4);
  message.largest = call_.plan.max_rows * row_elements * own_.element_size();
  if (visiting.numel() > 0) message.send = visiting;
  if (!hop.sent.empty() && row_elements > 0) {
    message.receive = received_[step - 1] = gradients(hop.sent.size());
  }
  if (message.send.defined() || message.receive.defined() || transport_.needs_every_rank()) {
    transfers_[step - 1] = transport_.start(message);
  }
}

void GradientReturn::add(int64_t step) {
  at::Tensor& received = received_[step - 1];
  if (transfers_[step - 1]) transfers_[step - 1]->wait();
  if (!received.defined()) return;
  const RowRange& rows = call_.plan.hops[step - 1].sent;
  own_.narrow(2, rows.begin, rows.size()).add_(received);
  received.reset();
}

void GradientReturn::finish() {
  for (const auto& transfer : transfers_) {
    if (transfer) transfer->finish();
  }
}

}  // namespace ringattn
