// SPDX-License-Identifier: Apache-2.0
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "transport/group/group_backend.h"
#include "transport/p2p/process_group.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A connection to the store's server that nothing is ever sent over: it closes when the process
// that holds the store ends. Note: c10d writes C++ stacks to stderr when a store whose server is
// gone is used, so this connection is tested before each use.
class StoreProbe {
 public:
  static std::unique_ptr<StoreProbe> of(c10d::Store& store) {
    c10d::Store* inner = &store;
    while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(inner)) {
      inner = prefixed->getUnderlyingStore().get();
    }
    const auto* server = dynamic_cast<const c10d::TCPStore*>(inner);
    if (server == nullptr) return nullptr;
    const int connection = connect_to(*server);
    TORCH_CHECK_WITH(DistBackendError, connection >= 0,
                     "the process that holds the group's store must be alive, got no connection "
                     "to it at ",
                     server->getHost(), ":", server->getPort());
    return std::unique_ptr<StoreProbe>(new StoreProbe(connection));
  }
  ~StoreProbe() { close(connection_); }
  StoreProbe(const StoreProbe&) = delete;
  StoreProbe& operator=(const StoreProbe&) = delete;

  bool is_open() const {
    char byte = 0;
    const ssize_t got = recv(connection_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  }

 private:
  explicit StoreProbe(int connection) : connection_(connection) {}

  static int connect_to(const c10d::TCPStore& server) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const std::string port = std::to_string(server.getPort());
    if (getaddrinfo(server.getHost().c_str(), port.c_str(), &hints, &found) != 0) return -1;
    int connection = -1;
    for (const addrinfo* at = found; at != nullptr && connection < 0; at = at->ai_next) {
      connection = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
      if (connection < 0 || connect(connection, at->ai_addr, at->ai_addrlen) == 0) continue;
      close(connection);
      connection = -1;
    }
    freeaddrinfo(found);
    return connection;
  }

  int connection_;
};

class ProcessGroupBackend : public GroupBackend {
 public:
  ProcessGroupBackend(std::string name, c10::intrusive_ptr<c10d::ProcessGroup> group)
      : name_(std::move(name)),
        group_(group),
        rank_(group->getRank()),
        size_(group->getSize()),
        timeout_(find_timeout(*group)) {
    if (size_ == 1) return;
    store_ = group->getStore();
    probe_ = StoreProbe::of(*store_);  // before the store is used
    try {
      spare_ = store_->clone();
    } catch (const std::exception& error) {
      TORCH_CHECK(false,
                  "ringattn: group must have a store that can be cloned, got one that says: ",
                  error.what());
    }
    const std::string counter = "ringattn/" + std::to_string(rank_);
    prefix_ = "ringattn/" + std::to_string(store().add(counter, 1)) + "/";
  }

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  milliseconds timeout() const override { return timeout_; }

  bool current() const override {
    const auto group = group_.lock();
    if (!group) return false;
    try {
      return c10d::resolve_process_group(name_).get() == group.get();
    } catch (const c10::Error&) {
      return false;  // the name is gone
    }
  }

  void put(const std::string& key, const std::string& value) override {
    if (!store_) return;
    TORCH_CHECK_WITH(DistBackendError, store_is_alive(),
                     "the process that holds the group's store must be alive, got a closed "
                     "connection to it");
    store().set(prefix_ + key, value);
  }

  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    if (!store_ || !store_is_alive()) return {};
    // Note: polls, because a wait of the store that times out writes to stderr.
    const auto deadline = Clock::now() + patience;
    auto pause = std::chrono::microseconds(100);
    constexpr auto kLongestPause = std::chrono::microseconds(5000);
    try {
      while (!store().check({prefix_ + key})) {
        if (Clock::now() >= deadline || !store_is_alive()) return {};
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestPause);
      }
      return store().get_to_str(prefix_ + key);
    } catch (const std::exception&) {
      return {};
    }
  }

  void remove(const std::string& key) override {
    if (store_ && store_is_alive()) store().deleteKey(prefix_ + key);
  }

  bool store_is_alive() override { return probe_ == nullptr || probe_->is_open(); }

  bool is_connected(int64_t rank) override {
    const auto group = group_.lock();
    if (!group || !carries(c10::kCPU)) return true;
    constexpr int kUnusedTag = 0x7ffffff0;
    std::vector<at::Tensor> tensors = {at::empty({1}, at::kByte)};
    try {
      unanswered_.keep(group->recv(tensors, static_cast<int>(rank), kUnusedTag));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  bool carries(c10::DeviceType device_type) const override {
    const auto group = group_.lock();
    if (!group) return true;  // its next use fails with an error that says so
    try {
      return group->getBackend(device_type).defined();
    } catch (const c10::Error&) {
      return false;
    }
  }

  std::unique_ptr<MessageTransport> transport(const Rendezvous& rendezvous,
                                              c10::Device device) override {
    return make_process_group_transport(rendezvous, group_.lock(), device);
  }

 private:
  // Each thread has a clone of the store, with a connection of its own: a thread that waits does
  // not keep other threads, such as the watchdog's, from the store. The second thread, as a rule
  // the watchdog's, gets a clone that was made with the group: later, the rank that holds the store
  // may be gone, and connecting would take as long as the store's own timeout.
  c10d::Store& store() {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& clone = clones_[std::this_thread::get_id()];
    if (!clone) clone = clones_.size() == 2 && spare_ ? std::move(spare_) : store_->clone();
    return *clone;
  }

  // The timeout that the group was made with; c10d's own default where no backend has one.
  static milliseconds find_timeout(c10d::ProcessGroup& group) {
    for (const auto type : {c10::kCPU, c10::kCUDA}) {
      try {
        const auto options = group.getBackend(type)->getBackendOptions();
        if (options) return options->timeout;
      } catch (const c10::Error&) {
        // no backend for this device type, or one that keeps its options to itself
      }
    }
    return ::kBackendDefaultTimeout;
  }

  std::string name_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t rank_, size_;
  milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;  // the group's; null for a single rank
  std::unique_ptr<StoreProbe> probe_;      // null for a store without a server
  Unfinished unanswered_;
  std::mutex mutex_;                       // guards what follows
  c10::intrusive_ptr<c10d::Store> spare_;  // for the second thread
  std::map<std::thread::id, c10::intrusive_ptr<c10d::Store>> clones_;
  std::string prefix_;
};

std::shared_ptr<GroupBackend> find_process_group(const std::string& name) {
  return std::make_shared<ProcessGroupBackend>(name, c10d::resolve_process_group(name));
}

const bool registered = register_backend(&find_process_group) &&
                        register_transport({"process_group", /*preference=*/0});

}  // namespace

}  // namespace ringattn
