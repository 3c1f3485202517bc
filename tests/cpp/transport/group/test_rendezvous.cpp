// SPDX-License-Identifier: Apache-2.0
// Transports made from a rendezvous, of a whole group or of some of its ranks, and found by name.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "fake_backend.h"
#include "transport/group/group_context.h"
#include "transport/group/rendezvous.h"
#include "transport/p2p_transport.h"
#include "transport/registry.h"

using namespace ringattn;
using ringattn::testing::FakeBackend;
using ringattn::testing::Store;
using std::chrono::milliseconds;

namespace {

constexpr auto kTimeout = milliseconds(5000);

// Messages between threads of one process, as bytes in the store whose name rank 0 says when the
// ranks meet.
class StoreTransport : public MessageTransport {
 public:
  explicit StoreTransport(const Rendezvous& rendezvous) : rendezvous_(rendezvous) {
    prefix_ = rendezvous.exchange("from rank " + std::to_string(rendezvous.rank)).front();
  }
  std::unique_ptr<Transfer> start(const Message& message) override;
  bool can_be_captured() const override { return rendezvous_.rank == 0; }

 private:
  static Store& messages() {
    static Store store;
    return store;
  }
  std::string key(int64_t source, int64_t destination, int64_t step) const {
    return prefix_ + std::to_string(source) + ">" + std::to_string(destination) + "#" +
           std::to_string(rendezvous_.calls->message_tag(step));
  }

  class Receipt : public Transfer {
   public:
    Receipt(const StoreTransport& transport, const Message& message)
        : transport_(transport), message_(message) {}
    void wait() override {
      const Rendezvous& ranks = transport_.rendezvous_;
      const auto bytes = messages().get(transport_.key(message_.source, ranks.rank, message_.step),
                                        ranks.patience() / 50);
      if (!bytes) {
        CallMonitor& calls = *ranks.calls;
        calls.fail(calls.blame(message_.call, message_.step, {message_.source}, "silence"));
        return calls.throw_if_failed();
      }
      bytes->copy(static_cast<char*>(message_.receive.mutable_data_ptr()), bytes->size());
    }
    void finish() override {}
    double elapsed_ms() override { return 0.0; }

   private:
    const StoreTransport& transport_;
    const Message message_;
  };

  const Rendezvous rendezvous_;
  std::string prefix_;
};

std::unique_ptr<Transfer> StoreTransport::start(const Message& message) {
  messages().put(
      key(rendezvous_.rank, message.destination, message.step),
      std::string(static_cast<const char*>(message.send.const_data_ptr()), message.send.nbytes()));
  return std::make_unique<Receipt>(*this, message);
}

// The first calls of ranks without a group.
class Calls : public CallMonitor {
 public:
  int32_t message_tag(int64_t step) const override { return static_cast<int32_t>(step); }
  int32_t call_tag() const override { return 0; }
  std::string operation(int64_t call) const override { return "a call"; }
  void check_peers(int64_t, const Ranks&, const std::string&) override {}
  void check_connections(const Ranks&, const std::string&) override {}
  std::optional<std::string> ended_by(int64_t, const Ranks&) override { return {}; }
  std::optional<std::string> refused_next(const Ranks&) override { return {}; }
  void lose(int64_t, int64_t, const std::string&, const std::string&) override {}
  using CallMonitor::blame;
  std::string blame(int64_t, const std::string& place, const Ranks& suspects,
                    const std::string& reason) override {
    return one_of(suspects) + " in " + place + " (" + reason + ")";
  }
  void fail(const std::string& message) override { failure_ = message; }
  void throw_if_failed() override {
    TORCH_CHECK_WITH(DistBackendError, failure_.empty(), failure_);
  }

 private:
  std::string failure_;
};

// Some ranks of a larger world, which say what they have to say through a store.
Rendezvous meet(Store& store, const std::vector<int64_t>& members, int64_t index) {
  const auto exchange = [&store, members, index](const std::string& mine) {
    store.put("said/" + std::to_string(members[index]), mine);
    std::vector<std::string> said;
    for (const int64_t member : members) {
      said.push_back(*store.get("said/" + std::to_string(member), kTimeout));
    }
    return said;
  };
  return {index, static_cast<int64_t>(members.size()), kTimeout, exchange,
          std::make_shared<Calls>()};
}

void at_once(int64_t count, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t index = 0; index < count; ++index) threads.emplace_back(body, index);
  for (auto& thread : threads) thread.join();
}

RingExchangePlan exchange_of(int64_t index, int64_t size, double value) {
  RingExchangePlan exchange;
  exchange.k = at::full({1, 2, 1, 8}, value);
  exchange.v = -exchange.k;
  for (int64_t step = 1; step < size; ++step) {
    exchange.hops.push_back(
        {(index + step) % size, (index - step + size) % size, {{0, 2}, {}}, {{0, 2}, {}}, 2});
  }
  return exchange;
}

std::string said(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

TEST_CASE("some ranks of a world make a transport without a group and move blocks over it") {
  Store store;
  const std::vector<int64_t> members = {1, 3, 6};
  std::vector<std::vector<double>> seen(3);
  at_once(3, [&](int64_t index) {
    StoreTransport transport(meet(store, members, index));
    const auto stream = transport.open(exchange_of(index, 3, static_cast<double>(members[index])));
    for (int64_t step = 1; step < 3; ++step) {
      stream->release(step - 1);
      const Block block = stream->wait(step);
      seen[index].push_back((block.k - block.v).mean().item<double>() / 2);
    }
  });
  CHECK(seen == std::vector<std::vector<double>>{{6, 3}, {1, 6}, {3, 1}});
}

TEST_CASE("a transport without a group says which of its own ranks did not send") {
  Store store;
  store.put("said/3", "nothing");
  StoreTransport transport(meet(store, {1, 3}, 0));
  const auto stream = transport.open(exchange_of(0, 2, 1.0));
  CHECK(said([&] { stream->wait(1); }) == "rank 1 in step 1 of the ring (silence)");
}

TEST_CASE("ranks of a rendezvous beside one's own are ascending") {
  CHECK(Rendezvous{1, 3}.others() == std::vector<int64_t>{0, 2});
  CHECK(Rendezvous{}.others().empty());
}

TEST_CASE("a transport that registers is made by its name, and named in errors") {
  constexpr auto kDevice = c10::DeviceType::Meta;  // no other test has tensors there
  register_transport(
      {"store", /*preference=*/9, kDevice, [](const Rendezvous& rendezvous, c10::Device) {
         return std::unique_ptr<MessageTransport>(new StoreTransport(rendezvous));
       }});
  CHECK(transport_names().front() == "process_group");
  CHECK(transport_names().back() == "store");

  Store store;
  std::vector<std::string> taken(2);
  std::vector<std::pair<bool, bool>> can_record(2);  // before its first call, and after
  at_once(2, [&](int64_t rank) {
    GroupContext group(std::make_shared<FakeBackend>(store, rank, 2, kTimeout));
    can_record[rank].first = group.can_record();
    MessageTransport* const made = &group.transport("store", kDevice);
    if (&group.transport("auto", kDevice) == made) taken[rank] = group.last_transport();
    can_record[rank].second = group.can_record();
  });
  CHECK(taken == std::vector<std::string>(2, "store"));
  CHECK(can_record == std::vector<std::pair<bool, bool>>{{false, true}, {false, false}});

  CHECK(said([] { check_transport("smoke", c10::kCPU); }) ==
        "ringattn: transport must be \"auto\", \"process_group\", \"nccl\", \"symmetric\" or "
        "\"store\", got \"smoke\"");
  CHECK(said([] { check_transport("store", c10::kCPU); }) ==
        "ringattn: transport \"store\" must be given META tensors, got cpu tensors");
  CHECK(said([] { check_transport("auto", c10::kCPU); }).empty());
#ifdef RINGATTN_WITH_CUDA
  CHECK(said([] { check_transport("nccl", c10::kCPU); }) ==
        "ringattn: transport \"nccl\" must be given CUDA tensors, got cpu tensors");
#else
  CHECK(said([] { check_transport("nccl", c10::kCUDA); }) ==
        "ringattn: transport must be \"auto\", \"process_group\" or \"store\" in a build without "
        "CUDA, got \"nccl\"");
#endif

  // A preferred one that the ranks cannot have, and that says so on all of them.
  static bool fails_on_rank_1 = false;
  register_transport(
      {"remote", /*preference=*/10, kDevice, [](const Rendezvous& rendezvous, c10::Device) {
         TORCH_CHECK(!fails_on_rank_1 || rendezvous.rank == 0, "out of memory");
         rendezvous.exchange("host of rank " + std::to_string(rendezvous.rank));
         TORCH_CHECK(false, "ringattn: ranks must share a host");
         return std::unique_ptr<MessageTransport>();
       }});
  const auto chosen = [&](Store& their_store, int64_t rank) {
    GroupContext group(std::make_shared<FakeBackend>(their_store, rank, 2, kTimeout));
    const std::string error = said([&] { group.transport("auto", kDevice); });
    return error + group.last_transport();
  };
  Store another_store;
  at_once(2, [&](int64_t rank) { taken[rank] = chosen(another_store, rank); });
  CHECK(taken == std::vector<std::string>(2, "store"));
  // Where one rank alone fails, the group has: no other transport is tried.
  fails_on_rank_1 = true;
  Store third_store;
  at_once(2, [&](int64_t rank) { taken[rank] = chosen(third_store, rank); });
  for (const std::string& error : taken) {
    INFO(error);
    CHECK(error.find("out of memory") != std::string::npos);
    CHECK(error.find("store") == std::string::npos);
  }
}
