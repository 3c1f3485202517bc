// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "transport/group/group_backend.h"
#include "transport/p2p_transport.h"

namespace ringattn::testing {

using std::chrono::milliseconds;

/// What the ranks of a group in one process read and write.
class Store {
 public:
  void put(const std::string& key, const std::string& value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::optional<std::string> get(const std::string& key, milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, patience, [&] { return values_.count(key) > 0; });
    const auto found = values_.find(key);
    if (found == values_.end()) return {};
    return found->second;
  }
  void remove(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_.erase(key);
  }
  void die() { alive_ = false; }
  void close_connections_of(int64_t rank) { closed_ = rank; }
  bool is_closed(int64_t rank) const { return closed_ == rank; }
  bool is_alive() const { return alive_; }
  size_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::atomic<bool> alive_{true};
  std::atomic<int64_t> closed_{-1};  // a rank whose connections are closed
};

/// A rank of such a group. It carries CPU tensors, but not today.
class FakeBackend : public GroupBackend {
 public:
  FakeBackend(Store& store, int64_t rank, int64_t size, milliseconds timeout)
      : store_(store), rank_(rank), size_(size), timeout_(timeout) {}
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  milliseconds timeout() const override { return timeout_; }
  bool current() const override { return true; }
  void put(const std::string& key, const std::string& value) override { store_.put(key, value); }
  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    return store_.get(key, patience);
  }
  void remove(const std::string& key) override { store_.remove(key); }
  bool store_is_alive() override { return store_.is_alive(); }
  bool is_connected(int64_t rank) override { return !store_.is_closed(rank); }
  bool carries(c10::DeviceType device_type) const override { return device_type == c10::kCPU; }
  std::unique_ptr<MessageTransport> transport(const Rendezvous& rendezvous,
                                              c10::Device device) override {
    throw std::runtime_error("no backend today");
  }

 private:
  Store& store_;
  int64_t rank_, size_;
  milliseconds timeout_;
};

}  // namespace ringattn::testing
