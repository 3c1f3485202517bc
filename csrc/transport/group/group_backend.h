// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/export.h"

namespace ringattn {

class MessageTransport;
struct Rendezvous;

/// What a ring needs of a process group: its ranks, a store that all of them can read, and a
/// transport. c10d stays behind this interface. Thread-safe.
class RINGATTN_API GroupBackend {
 public:
  virtual ~GroupBackend() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  /// How long a rank may keep the others waiting.
  virtual std::chrono::milliseconds timeout() const = 0;
  /// The group's name still means this group: names are reused after a group has been destroyed.
  virtual bool current() const = 0;

  /// The group's store. The keys are this group's alone, also among groups that had its name
  /// before.
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// Waits for the key; nothing where it is not set in time. A patience of 0 ms: does not wait.
  virtual std::optional<std::string> get(const std::string& key,
                                         std::chrono::milliseconds patience) = 0;
  /// The same until a point in time; reads at least once.
  std::optional<std::string> get_until(const std::string& key,
                                       std::chrono::steady_clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    return get(key, std::max(left, std::chrono::milliseconds(1)));
  }
  virtual void remove(const std::string& key) = 0;
  /// Whether the process that holds the store is alive, as far as is known without a wait.
  virtual bool store_is_alive() = 0;
  /// Whether the group's connection to a rank is open, as far as is known without a wait. Each call
  /// leaves an unmatched receive of one byte behind.
  virtual bool is_connected(int64_t rank) = 0;

  /// Whether the group itself moves tensors of this kind.
  virtual bool carries(c10::DeviceType device_type) const = 0;
  /// Messages through the group itself: gloo on CPU, NCCL on CUDA.
  virtual std::unique_ptr<MessageTransport> transport(const Rendezvous& rendezvous,
                                                      c10::Device device) = 0;
};

}  // namespace ringattn
