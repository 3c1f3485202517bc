// SPDX-License-Identifier: Apache-2.0
#include "ring/gradient_return.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace ringattn {

GradientReturn::GradientReturn(MessageTransport* transport, const RingCall& call,
                               const at::Tensor& own)
    : transport_(transport),
      call_(call),
      own_(own),
      row_elements_(2 * own.size(1) * own.size(3) * own.size(4)),
      leaving_(buffers(&HopPlan::received)),
      arriving_(buffers(&HopPlan::sent)),
      transfers_(call.plan.hops.size()) {}

std::vector<at::Tensor> GradientReturn::buffers(RowSet HopPlan::*rows) const {
  std::vector<at::Tensor> buffers;
  for (const int64_t largest : buffer_rows(call_.plan.hops, /*depth=*/1, rows)) {
    buffers.push_back(at::empty({largest * row_elements_}, own_.options()));
  }
  return buffers;
}

at::Tensor GradientReturn::gradients(const std::vector<at::Tensor>& buffers, int64_t step,
                                     int64_t rows) const {
  auto sizes = own_.sizes().vec();
  sizes[2] = rows;
  return buffers[(step - 1) % buffers.size()].narrow(0, 0, rows * row_elements_).view(sizes);
}

at::Tensor GradientReturn::visiting(int64_t step) const {
  return gradients(leaving_, step, call_.plan.hops[step - 1].received.size());
}

void GradientReturn::send(int64_t step) {
  const HopPlan& hop = call_.plan.hops[step - 1];
  Message message;
  message.call = call_.number;
  message.step = step;
  message.returns = true;
  message.destination = hop.source;
  message.source = hop.destination;
  message.largest = call_.plan.largest_message(own_.select(0, 0), own_.scalar_type());
  if (!hop.received.empty() && row_elements_ > 0) message.send = visiting(step);
  if (!hop.sent.empty() && row_elements_ > 0) {
    message.receive = arriving(step);
  }
  if (message.send.defined() || message.receive.defined() || transport_->needs_every_rank()) {
    transfers_[step - 1] = transport_->start(message);
  }
}

at::Tensor GradientReturn::arriving(int64_t step) {
  const int64_t rows = call_.plan.hops[step - 1].sent.size();
  // The first ones of several are the sum so far, where they are of all rows.
  if (step == 1 && num_hops() > 1 && rows == own_.size(2)) {
    if (!returned_.defined()) returned_ = at::empty(own_.sizes(), own_.options());
    return returned_;
  }
  return gradients(arriving_, step, rows);
}

at::Tensor GradientReturn::received(int64_t step) {
  if (const auto& transfer = transfers_[step - 1]) transfer->wait_received();
  return arriving(step);
}

void GradientReturn::end(int64_t step) {
  if (const auto& transfer = transfers_[step - 1]) {
    transfer->wait();
    transfer->finish();
  }
}

void GradientReturn::add(int64_t step) {
  const at::Tensor arrived = received(step);
  if (arrived.numel() > 0 && !arrived.is_same(returned_)) {
    if (!returned_.defined()) returned_ = at::zeros(own_.sizes(), own_.options());
    int64_t first = 0;  // of `arrived`
    for (const RowRange& rows : call_.plan.hops[step - 1].sent.ranges()) {
      rows_of(returned_, 2, rows).add_(rows_of(arrived, 2, {first, first + rows.size()}));
      first += rows.size();
    }
  }
  end(step);
}

std::array<at::Tensor, 2> GradientReturn::sum(at::ScalarType type) {
  if (returned_.defined()) own_.add_(returned_);
  // The last addition rounds as it writes: no pass of its own.
  const RowSet sent = num_hops() > 0 ? call_.plan.hops.back().sent : RowSet{};
  const at::Tensor last = num_hops() > 0 ? received(num_hops()) : at::Tensor();
  std::array<at::Tensor, 2> sums;  // each in memory of its own
  for (int64_t i = 0; i < 2; ++i) {
    const at::Tensor own = own_.select(0, i);
    sums[i] = at::empty(own.sizes(), own.options().dtype(type));
    const auto copy = [&](const RowRange& rows) {
      if (!rows.empty()) rows_of(sums[i], 1, rows).copy_(rows_of(own, 1, rows));
    };
    int64_t first = 0, done = 0;  // of `last`, and of the rows that are there
    for (const RowRange& rows : sent.ranges()) {
      if (rows.empty()) continue;
      copy({done, rows.begin});
      at::Tensor rounded = rows_of(sums[i], 1, rows);
      at::add_out(rounded, rows_of(own, 1, rows),
                  rows_of(last.select(0, i), 1, {first, first + rows.size()}));
      first += rows.size();
      done = rows.end;
    }
    copy({done, own_.size(2)});
  }
  if (num_hops() > 0) end(num_hops());
  return sums;
}

}  // namespace ringattn
