// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "catch.h"
#include "ring/gradient_return.h"

using ringattn::GradientReturn;
using ringattn::Mask;
using ringattn::Message;
using ringattn::Partition;
using ringattn::plan_ring;
using ringattn::RingCall;
using ringattn::RingPlan;
using ringattn::RowRange;

namespace {

// All ranks in one thread: what one has sent, another receives when it waits.
using Mail = std::map<std::tuple<int64_t, int64_t, int64_t>, at::Tensor>;  // from, to, step

class Mailbox : public ringattn::MessageTransport {
 public:
  Mailbox(Mail& mail, int64_t rank) : mail_(mail), rank_(rank) {}

  std::unique_ptr<ringattn::Transfer> start(const Message& message) override {
    if (message.send.defined()) {
      const auto key = std::make_tuple(rank_, message.destination, message.step);
      CHECK(mail_.emplace(key, message.send.clone()).second);
    }
    return std::make_unique<Delivery>(mail_, rank_, message);
  }

 private:
  class Delivery : public ringattn::Transfer {
   public:
    Delivery(Mail& mail, int64_t rank, Message message)
        : mail_(mail), rank_(rank), message_(std::move(message)) {}
    void wait() override {
      if (!message_.receive.defined() || delivered_) return;
      const auto found = mail_.find({message_.source, rank_, message_.step});
      REQUIRE(found != mail_.end());
      message_.receive.copy_(found->second);
      mail_.erase(found);
      delivered_ = true;
    }
    void finish() override {}
    double elapsed_ms() override { return 0.0; }

   private:
    Mail& mail_;
    const int64_t rank_;
    const Message message_;
    bool delivered_ = false;
  };

  Mail& mail_;
  const int64_t rank_;
};

// Of the rows of rank `owner` by the queries of rank `by`.
at::Tensor gradients(int64_t owner, int64_t by, int64_t rows) {
  return at::arange(2 * rows * 2, at::kDouble).view({2, 1, rows, 1, 2}) * (1 + by) + 1e4 * owner;
}

std::vector<RowRange> ranges_of(const ringattn::RowSet& rows) {
  return rows.empty() ? std::vector<RowRange>{} : rows.ranges();
}

void check_return(const Partition& partition, const Mask& mask) {
  const int64_t size = partition.world_size();
  INFO(size << " ranks, " << mask.cu_seqlens.size() << " bounds of documents");
  Mail mail;
  std::vector<RingPlan> plans;
  std::vector<RingCall> calls;
  std::vector<at::Tensor> expected;
  plans.reserve(size);
  calls.reserve(size);
  std::vector<Mailbox> transports;
  std::vector<std::unique_ptr<GradientReturn>> returns;
  transports.reserve(size);
  for (int64_t rank = 0; rank < size; ++rank) {
    plans.push_back(plan_ring(partition, partition, rank, mask));
    calls.push_back(RingCall{plans.back(), 1.0});
    transports.emplace_back(mail, rank);
    const at::Tensor own = gradients(rank, rank, partition.length(rank));
    expected.push_back(own.clone());
    returns.push_back(std::make_unique<GradientReturn>(&transports.back(), calls.back(), own));
  }
  for (int64_t step = 1; step < size; ++step) {
    for (int64_t rank = 0; rank < size; ++rank) {
      const auto& hop = plans[rank].hops[step - 1];
      const at::Tensor all = gradients(hop.source, rank, partition.length(hop.source));
      const ringattn::KeyGradients visiting = returns[rank]->visiting(step);
      int64_t row = 0;
      for (const RowRange& rows : ranges_of(hop.received)) {
        const at::Tensor seen = ringattn::rows_of(all, 2, rows);
        for (int64_t i = 0; i < 2; ++i) {
          const at::Tensor to = ringattn::rows_of(visiting[i], 1, {row, row + rows.size()});
          to.copy_(seen.select(0, i));
        }
        ringattn::rows_of(expected[hop.source], 2, rows).add_(seen);
        row += rows.size();
      }
      for (const at::Tensor& x : visiting) CHECK(x.size(1) == row);
      returns[rank]->send(step);
    }
  }
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto sums = returns[rank]->sum(at::kDouble);
    for (int64_t i = 0; i < 2; ++i) CHECK(at::equal(sums[i], expected[rank].select(0, i)));
  }
  CHECK(mail.empty());
}

}  // namespace

TEST_CASE("gradients of all ranks come back, in one round or in several") {
  for (const int64_t size : {2, 3, 9, 10, 18}) {
    std::vector<int64_t> lengths(size);
    for (int64_t rank = 0; rank < size; ++rank) lengths[rank] = rank % 4 == 3 ? 0 : 3 + rank;
    for (const auto layout : {ringattn::Layout::kZigzag, ringattn::Layout::kContiguous}) {
      const Partition partition(layout, lengths);
      for (const bool causal : {true, false}) check_return(partition, Mask{causal});
      Mask documents;
      documents.cu_seqlens = {0, 1, partition.seq_len() / 2, partition.seq_len()};
      check_return(partition, documents);
    }
  }
}
