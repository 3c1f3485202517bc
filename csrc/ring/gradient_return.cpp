// SPDX-License-Identifier: Apache-2.0
#include "ring/gradient_return.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

namespace ringattn {

GradientReturn::GradientReturn(MessageTransport* transport, const RingCall& call,
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
  if (message.send.defined() || message.receive.defined() || transport_->needs_every_rank()) {
    transfers_[step - 1] = transport_->start(message);
  }
}

std::array<at::Tensor, 2> GradientReturn::sum(at::ScalarType type) {
  std::vector<size_t> arrived;
  for (size_t hop = 0; hop < transfers_.size(); ++hop) {
    if (transfers_[hop]) transfers_[hop]->wait();
    if (received_[hop].defined()) arrived.push_back(hop);
  }
  const auto rows_at = [&](size_t hop) { return call_.plan.hops[hop].sent; };
  for (size_t i = 0; i + 1 < arrived.size(); ++i) {
    rows_of(own_, 2, rows_at(arrived[i])).add_(received_[arrived[i]]);
  }
  // The last addition rounds as it writes: no pass of its own.
  const RowRange last = arrived.empty() ? RowRange{} : rows_at(arrived.back());
  const RowRange before = {0, last.begin}, after = {last.end, own_.size(2)};
  std::array<at::Tensor, 2> sums;  // each in memory of its own
  for (int64_t i = 0; i < 2; ++i) {
    const at::Tensor own = own_.select(0, i);
    sums[i] = at::empty(own.sizes(), own.options().dtype(type));
    for (const RowRange& rows : {before, after}) {
      if (!rows.empty()) rows_of(sums[i], 1, rows).copy_(rows_of(own, 1, rows));
    }
    if (last.empty()) continue;
    at::Tensor rounded = rows_of(sums[i], 1, last);
    at::add_out(rounded, rows_of(own, 1, last), received_[arrived.back()].select(0, i));
  }
  for (const auto& transfer : transfers_) {
    if (transfer) transfer->finish();
  }
  return sums;
}

}  // namespace ringattn
