// SPDX-License-Identifier: Apache-2.0
// What two-sided transports have in common, over one that notes what is asked of it.
#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "catch.h"
#include "transport/p2p_transport.h"

using namespace ringattn;

namespace {

struct Noted {
  Message message;
  bool finished = false;
};

// Fills what it is to receive with the step's number when that is waited for.
class NotedTransfer : public Transfer {
 public:
  explicit NotedTransfer(Noted& noted) : noted_(noted) {}
  void wait() override {
    if (noted_.message.receive.defined()) noted_.message.receive.fill_(noted_.message.step);
  }
  void finish() override { noted_.finished = true; }
  double elapsed_ms() override { return 0.5 * static_cast<double>(noted_.message.step); }

 private:
  Noted& noted_;
};

class NotingTransport : public MessageTransport {
 public:
  std::unique_ptr<Transfer> start(const Message& message) override {
    noted.push_back(std::make_unique<Noted>());
    noted.back()->message = message;
    return std::make_unique<NotedTransfer>(*noted.back());
  }
  bool starts_as_one(const std::vector<Message>& messages) const override {
    return as_one && messages.size() > 1;
  }
  void guard(const std::vector<at::Tensor>& results) override { guarded = results; }

  std::vector<int64_t> steps() const {
    std::vector<int64_t> steps;
    for (const auto& each : noted) steps.push_back(each->message.step);
    return steps;
  }

  bool as_one = false;
  std::vector<std::unique_ptr<Noted>> noted;
  std::vector<at::Tensor> guarded;
};

// Five ranks; the block of 6 rows is seen in parts by others, and one of them sees nothing of it.
RingExchangePlan exchange_of(int64_t depth) {
  RingExchangePlan exchange;
  exchange.call = 7;
  exchange.k = at::randn({2, 6, 3, 8});
  exchange.v = at::randn({2, 6, 3, 8});
  //                destination, source, rows sent, received, of the source
  exchange.hops = {{1, 4, {{0, 2}, {}}, {{4, 9}, {{5, 7}}}, 9},
                   {2, 3, {{1, 6}, {{2, 3}, {4, 5}}}, {{0, 1}, {}}, 1},
                   {3, 2, {{0, 0}, {}}, {{6, 6}, {}}, 6},
                   {4, 1, {{3, 4}, {}}, {{0, 2}, {}}, 2}};
  exchange.depth = depth;
  exchange.timed = true;
  return exchange;
}

}  // namespace

TEST_CASE("messages are as many ahead as the depth says, and none is sent for nothing") {
  for (const int64_t depth : {1, 2, 4}) {
    NotingTransport transport;
    const auto stream = transport.open(exchange_of(depth));
    std::vector<int64_t> steps;  // with a message
    for (int64_t step = 1; step <= depth; ++step) {
      if (step != 3) steps.push_back(step);
    }
    CHECK(transport.steps() == steps);
    for (int64_t step = 0; step < 5; ++step) {
      stream->release(step);
      const int64_t next = step + depth + 1;
      if (next <= 4 && next != 3) steps.push_back(next);
      CHECK(transport.steps() == steps);
    }
  }
}

TEST_CASE("a message has the rows that its reader sees, keys and values of each row together") {
  NotingTransport transport;
  const RingExchangePlan exchange = exchange_of(4);
  const auto stream = transport.open(exchange);
  REQUIRE(transport.noted.size() == 3);
  const auto& hops = exchange.hops;
  const std::vector<size_t> hop_of = {0, 1, 3};
  for (size_t i = 0; i < hop_of.size(); ++i) {
    const Message& message = transport.noted[i]->message;
    const HopPlan& hop = hops[hop_of[i]];
    CHECK(message.call == 7);
    CHECK(message.timed);
    CHECK(message.destination == hop.destination);
    CHECK(message.source == hop.source);
    CHECK(message.send.is_contiguous());
    CHECK(message.receive.is_contiguous());
    CHECK(message.receive.sizes() == at::IntArrayRef({hop.received.size(), 2, 2, 3, 8}));
    std::vector<at::Tensor> sent;
    for (const RowRange& rows : hop.sent.ranges()) {
      sent.push_back(at::stack({exchange.k, exchange.v}).narrow(2, rows.begin, rows.size()));
    }
    CHECK(at::equal(message.send, at::cat(sent, 2).permute({2, 0, 1, 3, 4})));
  }
}

TEST_CASE("blocks that are in use at one time share no memory, others do") {
  for (const int64_t depth : {1, 2, 4}) {
    NotingTransport transport;
    const auto stream = transport.open(exchange_of(depth));
    std::set<const void*> places;
    std::vector<const void*> place_of_step = {nullptr};
    for (int64_t step = 1; step <= 4; ++step) {
      stream->release(step - 1);
      const Block block = stream->wait(step);
      const int64_t rows = exchange_of(depth).hops[step - 1].received.size();
      CHECK(block.k.sizes() == at::IntArrayRef({2, rows, 3, 8}));
      CHECK(block.v.sizes() == block.k.sizes());
      if (rows > 0) {
        CHECK(block.k.eq(static_cast<double>(step)).all().item<bool>());
        CHECK(block.v.eq(static_cast<double>(step)).all().item<bool>());
      }
      const void* place = block.k.storage().data();
      places.insert(place);
      place_of_step.push_back(place);
      // That of the step before is being attended, and up to `depth` are ahead of it.
      for (int64_t other = std::max<int64_t>(1, step - depth); other < step; ++other) {
        CHECK(place_of_step[other] != place);
      }
    }
    CHECK(static_cast<int64_t>(places.size()) == std::min<int64_t>(4, depth + 1));
  }
}

TEST_CASE("a stream has all blocks at one time where their messages start as one") {
  NotingTransport transport;
  CHECK(transport.open(exchange_of(4))->resident_blocks() == nullptr);
  transport.as_one = true;
  // Not all messages start at the beginning.
  CHECK(transport.open(exchange_of(2))->resident_blocks() == nullptr);
  const auto stream = transport.open(exchange_of(4));
  const ResidentBlocks* const resident = stream->resident_blocks();
  REQUIRE(resident != nullptr);
  CHECK(resident->sources.empty());  // they are waited for
  REQUIRE(resident->blocks.size() == 4);
  for (int64_t step = 1; step <= 4; ++step) {
    const Block waited = stream->wait(step), &block = resident->blocks[step - 1];
    CHECK(block.k.sizes() == waited.k.sizes());
    CHECK(block.k.data_ptr() == waited.k.data_ptr());
    CHECK(block.v.data_ptr() == waited.v.data_ptr());
  }
  stream->finish({});
  CHECK(stream->resident_blocks() == nullptr);  // no tensors outlive the call
}

TEST_CASE(
    "a stream finishes its messages, guards what came of them, and knows how long they took") {
  NotingTransport transport;
  const auto stream = transport.open(exchange_of(4));
  const at::Tensor result = at::zeros({1});
  stream->finish({result});
  for (const auto& noted : transport.noted) CHECK(noted->finished);
  REQUIRE(transport.guarded.size() == 1);
  CHECK(transport.guarded[0].is_same(result));
  CHECK(stream->transfer_ms(2) == 1.0);
  CHECK(stream->transfer_ms(3) == 0.0);  // nothing travelled
  CHECK(stream->transfer_ms(4) == 2.0);
}
