// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "core/process_singleton.h"
#include "core/refusal.h"
#include "transport/group/group_backend.h"
#include "transport/p2p/process_group.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// c10d keeps the prefix of a store to itself.
struct OpenPrefixStore : c10d::PrefixStore {
  static const std::string& prefix_of(const c10d::PrefixStore& store) {
    return store.*(&OpenPrefixStore::prefix_);
  }
};

// This process's connection to the server of a store, for all groups over that store. Thread-safe.
//
// Note: one, however many groups and threads there are. c10d looks up a name for each connection
// that it makes or accepts; on a host without reverse DNS this takes seconds, in which the server
// answers no rank. And not the group's own: there a thread of c10d's may wait for a key, and keep
// the watchdog from the store.
class StoreConnection {
 public:
  using Address = std::array<uint8_t, sizeof(in6_addr) + sizeof(in_port_t)>;

  static std::shared_ptr<StoreConnection> of(const c10::intrusive_ptr<c10d::Store>& store) {
    struct Connections {
      std::mutex mutex;
      std::vector<std::pair<c10::weak_intrusive_ptr<c10d::Store>, std::shared_ptr<StoreConnection>>>
          by_store;
    };
    auto& [mutex, by_store] = process_singleton<Connections>();
    const std::lock_guard<std::mutex> lock(mutex);
    by_store.erase(std::remove_if(by_store.begin(), by_store.end(),
                                  [](const auto& entry) { return entry.first.expired(); }),
                   by_store.end());
    for (const auto& [known, connection] : by_store) {
      if (known.lock().get() == store.get()) return connection;
    }
    by_store.emplace_back(store, std::make_shared<StoreConnection>(*store));
    return by_store.back().second;
  }

  explicit StoreConnection(c10d::Store& store) {
    if (const auto* server = dynamic_cast<const c10d::TCPStore*>(&store)) {
      socket_ = find_socket(*server);
      check_open();  // before the store is used
    }
    try {
      store_ = store.clone();
    } catch (const std::exception& error) {
      TORCH_CHECK(false,
                  "ringattn: group must have a store that can be cloned, got one that says: ",
                  error.what());
    }
  }
  ~StoreConnection() {
    if (socket_ >= 0) close(socket_);
  }
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // Whether the process that holds the store is alive. Note: c10d writes C++ stacks to stderr when
  // a store whose server is gone is used, so this is tested before each use.
  bool is_open() const {
    if (socket_ < 0) return true;  // a store without a server
    char byte = 0;
    const ssize_t got = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  }
  void check_open() const {
    TORCH_CHECK_WITH(DistBackendError, is_open(),
                     "the process that holds the group's store must be alive, got a closed "
                     "connection to it");
  }

 private:
  // Another handle of a socket that c10d has connected to the server; nothing is sent or received
  // over it. -1: none is found.
  static int find_socket(const c10d::TCPStore& server) {
    const std::vector<Address> addresses = addresses_of(server);
    const auto is_connected = [&](int file) {
      sockaddr_storage peer = {};
      socklen_t bytes = sizeof(peer);
      if (getpeername(file, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0) return false;
      return std::count(addresses.begin(), addresses.end(), address_of(peer)) > 0;
    };
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int file = std::stoi(entry.path().filename().string());
      if (!is_connected(file)) continue;
      const int copy = fcntl(file, F_DUPFD_CLOEXEC, 0);
      if (copy >= 0 && is_connected(copy)) return copy;  // c10d has not closed it meanwhile
      if (copy >= 0) close(copy);
    }
    return -1;
  }

  static std::vector<Address> addresses_of(const c10d::TCPStore& server) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const std::string port = std::to_string(server.getPort());
    std::vector<Address> addresses;
    if (getaddrinfo(server.getHost().c_str(), port.c_str(), &hints, &found) != 0) return addresses;
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      sockaddr_storage address = {};
      std::memcpy(&address, at->ai_addr, at->ai_addrlen);
      addresses.push_back(address_of(address));
    }
    freeaddrinfo(found);
    return addresses;
  }

  // Of IPv4, as IPv6 maps it.
  static Address address_of(const sockaddr_storage& socket_address) {
    Address address = {};
    if (socket_address.ss_family == AF_INET) {
      const auto& v4 = reinterpret_cast<const sockaddr_in&>(socket_address);
      address[10] = address[11] = 0xff;
      std::memcpy(&address[12], &v4.sin_addr, sizeof(v4.sin_addr));
      std::memcpy(&address[16], &v4.sin_port, sizeof(v4.sin_port));
    } else if (socket_address.ss_family == AF_INET6) {
      const auto& v6 = reinterpret_cast<const sockaddr_in6&>(socket_address);
      std::memcpy(&address[0], &v6.sin6_addr, sizeof(v6.sin6_addr));
      std::memcpy(&address[16], &v6.sin6_port, sizeof(v6.sin6_port));
    }
    return address;
  }

  int socket_ = -1;
  c10::intrusive_ptr<c10d::Store> store_;
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
    std::vector<std::string> prefixes;  // the outermost first
    auto inner = group->getStore();
    while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(inner.get())) {
      prefixes.push_back(OpenPrefixStore::prefix_of(*prefixed));
      inner = prefixed->getUnderlyingStore();
    }
    connection_ = StoreConnection::of(inner);
    connection_->check_open();
    store_ = connection_->store();
    for (; !prefixes.empty(); prefixes.pop_back()) {
      store_ = c10::make_intrusive<c10d::PrefixStore>(prefixes.back(), std::move(store_));
    }
    const std::string counter = "ringattn/" + std::to_string(rank_);
    prefix_ = "ringattn/" + std::to_string(store_->add(counter, 1)) + "/";
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
    connection_->check_open();
    store_->set(prefix_ + key, value);
  }

  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    if (!store_ || !store_is_alive()) return {};
    // Note: polls, because a wait of the store keeps other threads from it, and writes to stderr
    // where it times out.
    const auto deadline = Clock::now() + patience;
    auto pause = std::chrono::microseconds(100);
    constexpr auto kLongestPause = std::chrono::microseconds(5000);
    try {
      for (;;) {
        if (auto value = read(prefix_ + key)) return value;
        if (Clock::now() >= deadline || !store_is_alive()) return {};
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestPause);
      }
    } catch (const std::exception&) {
      return {};
    }
  }

  void remove(const std::string& key) override {
    if (store_ && store_is_alive()) store_->deleteKey(prefix_ + key);
  }

  bool store_is_alive() override { return connection_ == nullptr || connection_->is_open(); }

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
  // The value of a key, if it is there. A comparison with what no rank publishes waits for nothing;
  // not every store has it.
  std::optional<std::string> read(const std::string& key) {
    if (compares_) {
      static const std::string nothing = "ringattn: nothing";
      try {
        std::string value = store_->compareSet(key, nothing, nothing);
        return value == nothing ? std::nullopt : std::optional<std::string>(std::move(value));
      } catch (const std::exception&) {
        if (!store_is_alive()) throw;
        compares_ = false;
      }
    }
    if (!store_->check({key})) return {};
    return store_->get_to_str(key);
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
  std::shared_ptr<StoreConnection> connection_;  // null for a single rank, as is
  c10::intrusive_ptr<c10d::Store> store_;        // the group's keys, over that connection
  Unfinished unanswered_;
  std::string prefix_;
  std::atomic<bool> compares_{true};  // the store has compareSet
};

std::shared_ptr<GroupBackend> find_process_group(const std::string& name) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, kRefusalPrefix,
                "group_name must be of a process group that is there, got \"", name, "\" (",
                error.what_without_backtrace(), ")");
  }
  return std::make_shared<ProcessGroupBackend>(name, std::move(group));
}

const bool registered = register_backend(&find_process_group) &&
                        register_transport({"process_group", /*preference=*/0});

}  // namespace

}  // namespace ringattn
