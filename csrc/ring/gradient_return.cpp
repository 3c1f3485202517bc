// SPDX-License-Identifier: Apache-2.0
#include "ring/gradient_return.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace ringattn {

GradientReturn::GradientReturn(MessageTransport* transport, const RingCall& call,
                               const at::Tensor& own)
    : transport_(transport),
      call_(call),
      own_(own),
      row_elements_(2 * own.size(1) * own.size(3) * own.size(4)),
      largest_(call.plan.largest_message(own.select(0, 0), own.scalar_type())) {
  leaving_ =
      transport_->message_buffers(buffer_elements(&HopPlan::received), largest_, own_.options());
  for (const int64_t elements : buffer_elements(&HopPlan::sent)) {
    arriving_.push_back(at::empty({elements}, own_.options()));
  }
}

std::vector<int64_t> GradientReturn::buffer_elements(RowSet HopPlan::*rows) const {
  auto buffers = buffer_rows(call_.plan.hops, kStepsOfRound - 1, rows);
  for (int64_t& largest : buffers) largest *= row_elements_;
  return buffers;
}

at::Tensor GradientReturn::gradients(const std::vector<at::Tensor>& buffers, int64_t step,
                                     const RowSet& rows) const {
  auto sizes = own_.sizes().vec();
  sizes[2] = rows.size();
  return buffers[slot(step)].narrow(0, 0, rows.size() * row_elements_).view(sizes);
}

Message GradientReturn::message(int64_t step) const {
  const HopPlan& hop = call_.plan.hops[step - 1];
  Message message;
  message.call = call_.number;
  message.step = step;
  message.returns = true;
  message.destination = hop.source;
  message.source = hop.destination;
  message.largest = largest_;
  if (row_elements_ == 0) return message;
  if (!hop.received.empty()) message.send = gradients(leaving_, step, hop.received);
  if (!hop.sent.empty()) message.receive = arriving(step);
  return message;
}

std::vector<RowsToAdd> GradientReturn::returned(int64_t first, int64_t end) const {
  std::vector<RowsToAdd> parts;
  for (int64_t step = first; step < end; ++step) {
    round_->wait_received(slot(step));
    const at::Tensor arrived = arriving(step);
    if (arrived.numel() == 0) continue;
    int64_t row = 0;
    for (const RowRange& rows : call_.plan.hops[step - 1].sent.ranges()) {
      parts.push_back({rows_of(arrived, 2, {row, row + rows.size()}), rows});
      row += rows.size();
    }
  }
  return parts;
}

void GradientReturn::next_round(int64_t first_step) {
  if (round_) {
    if (!earlier_.defined()) earlier_ = at::zeros(own_.sizes(), own_.options());
    sum_rows(earlier_, returned(first_step - kStepsOfRound, first_step),
             {earlier_.select(0, 0), earlier_.select(0, 1)});
    round_->finish();
  }
  std::vector<Message> messages;
  const int64_t end = std::min(first_step + kStepsOfRound, num_hops() + 1);
  for (int64_t step = first_step; step < end; ++step) messages.push_back(message(step));
  round_ = transport_->open_round(std::move(messages));
}

KeyGradients GradientReturn::visiting(int64_t step) {
  if (slot(step) == 0) next_round(step);
  const at::Tensor both = gradients(leaving_, step, call_.plan.hops[step - 1].received);
  return {both.select(0, 0), both.select(0, 1)};
}

KeyGradients GradientReturn::sum(at::ScalarType type) {
  KeyGradients sums;  // each in memory of its own
  for (at::Tensor& sum : sums) {
    sum = at::empty(own_.sizes().slice(1), own_.options().dtype(type));
  }
  std::vector<RowsToAdd> parts = returned(num_hops() - slot(num_hops()), num_hops() + 1);
  if (earlier_.defined()) parts.push_back({earlier_, {0, own_.size(2)}});
  sum_rows(own_, parts, sums);
  round_->finish();
  return sums;
}

}  // namespace ringattn
