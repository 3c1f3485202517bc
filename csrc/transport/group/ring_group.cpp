// SPDX-License-Identifier: Apache-2.0
#include "transport/group/ring_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "core/log.h"
#include "core/process_singleton.h"
#include "transport/runtime/watchdog.h"

#ifdef RINGATTN_WITH_CUDA
#include "transport/p2p/nccl.h"
#include "transport/symmetric/transport.h"
#endif

namespace ringattn {
namespace {

constexpr const char* kPrefix = "ringattn: ";

struct Groups {
  std::mutex making;  // held while one is made
  std::mutex mutex;   // guards what follows
  std::map<std::string, std::shared_ptr<RingGroup>> by_name;
  std::vector<std::shared_ptr<RingGroup>> ending;  // destroyed groups with work under way
};

Groups& groups() { return process_wide<Groups>(); }

}  // namespace

std::shared_ptr<RingGroup> RingGroup::find(const std::string& name) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  const auto found = groups().by_name.find(name);
  if (found == groups().by_name.end() || !found->second->peers().current()) return nullptr;
  return found->second;
}

std::shared_ptr<RingGroup> RingGroup::resolve(const std::string& name) {
  if (auto group = find(name)) return group;
  // Made once, whichever threads come for it: a rank that had made two would be out of step with
  // the others. Its store is asked meanwhile, so the other lock is not held.
  const std::lock_guard<std::mutex> one_at_a_time(groups().making);
  if (auto group = find(name)) return group;
  collect();
  auto group = std::make_shared<RingGroup>(find_peers(name));
  const std::lock_guard<std::mutex> lock(groups().mutex);
  groups().by_name[name] = group;
  Watchdog::get().every_half_second(&RingGroup::collect);
  return group;
}

void RingGroup::collect() {
  std::vector<std::shared_ptr<RingGroup>>
      dead;  // destroyed outside the lock: communicators take a while
  Groups& all = groups();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& by_name = all.by_name;
  auto& ending = all.ending;
  for (auto entry = by_name.begin(); entry != by_name.end();) {
    if (entry->second->peers().current()) {
      ++entry;
    } else {
      ending.push_back(std::move(entry->second));
      entry = by_name.erase(entry);
    }
  }
  for (auto group = ending.begin(); group != ending.end();) {
    if (!(*group)->idle()) {
      ++group;
    } else {
      dead.push_back(std::move(*group));
      group = ending.erase(group);
    }
  }
}

RingGroup::RingGroup(std::unique_ptr<Peers> peers)
    : peers_(std::move(peers)), agreement_(*peers_) {}

std::vector<int64_t> RingGroup::others() const {
  std::vector<int64_t> ranks(size());
  std::iota(ranks.begin(), ranks.end(), 0);
  ranks.erase(ranks.begin() + rank());
  return ranks;
}

std::string RingGroup::without_prefix(const std::string& message) {
  return message.rfind(kPrefix, 0) == 0 ? message.substr(std::string(kPrefix).size()) : message;
}

void RingGroup::join(int64_t call, Signature signature, bool tagged) {
  const std::string operation = signature.operation();
  PeerWait wait(*this, PeerWait::kNoCall, /*step=*/0, {}, operation);
  try {
    agreement_.join(call, std::move(signature), tagged, [&](int64_t rank) {
      wait.set_peers({rank});
      wait.poll();
    });
  } catch (const c10::DistBackendError& error) {
    if (!peers_->store_is_alive()) lose_store(wait.place());
    fail(error.what_without_backtrace());  // a rank that comes later must not find itself alone
    throw_if_failed();                     // with why it failed first
  }
}

void RingGroup::refuse_call(const std::string& message) {
  agreement_.refuse(next_call_++, without_prefix(message));
}

void RingGroup::check_device(c10::Device device, const std::string& transport) const {
  const auto known = devices_.find(device.type());
  TORCH_CHECK(known == devices_.end() || known->second == device, "ringattn: tensors must be on ",
              known->second, ", where this group's first ones were, got ", device);
  if (device.is_cpu() || transport == "process_group") {
    TORCH_CHECK(peers_->carries(device.type()),
                "ringattn: group must have a backend for tensors on ",
                c10::DeviceTypeName(device.type(), /*lower_case=*/true), ", got one that has none");
  }
}

std::vector<std::string> RingGroup::exchange(const std::string& mine,
                                             const std::string& operation) {
  const auto key = [&](int64_t number, int64_t rank) {
    return "exchange/" + std::to_string(number) + "/" + std::to_string(rank);
  };
  constexpr auto kLook = std::chrono::milliseconds(100);
  const int64_t number = num_exchanges_++;
  PeerWait wait(*this, PeerWait::kNoCall, /*step=*/0, {},
                operation.empty() ? this->operation(next_call_ - 1) : operation);
  if (!peers_->store_is_alive()) lose_store(wait.place());
  peers_->put(key(number, rank()), mine);
  std::vector<std::string> words;
  for (int64_t other = 0; other < size(); ++other) {
    wait.set_peers({other});
    auto word = peers_->get(key(number, other), std::min(kLook, peers_->timeout() / 5));
    while (!word && !wait.expired()) {
      wait.poll();
      word = peers_->get(key(number, other), std::min(kLook, peers_->timeout() / 5));
    }
    if (!word) {
      fail("rank " + std::to_string(other) + " did not come to " + wait.place() + " within the " +
           "group's timeout of " + std::to_string(peers_->timeout().count()) +
           " ms; the group cannot be used any more");
    }
    throw_if_failed();
    words.push_back(*word);
  }
  // Every rank has come here, so every rank has read all that was said before.
  if (number > 0) peers_->remove(key(number - 1, rank()));
  return words;
}

MessageTransport& RingGroup::transport(const std::string& name, c10::Device device) {
  check_transport(name, device.type());
  const std::string chosen = name == "auto" ? choose_transport(device) : name;
  auto& transport = transports_[chosen + " on " + c10::DeviceTypeName(device.type())];
  if (!transport) {
    try {
      transport = make_transport(chosen, device);
    } catch (const std::exception& error) {
      // What all ranks have been told is a refusal; what fails here alone leaves the others
      // waiting.
      if (!failed_ && reason_of(error).rfind(kPrefix, 0) != 0) fail_call(next_call_ - 1, error);
      throw;
    }
    devices_.emplace(device.type(), device);
    if (logs_info()) {
      log(LogLevel::kInfo, "rank " + std::to_string(rank()) + " of " + std::to_string(size()) +
                               ": ring formed over transport " + chosen +
                               (name == "auto" ? " (chosen for " : " (asked for, ") + "device " +
                               device.str() + ")");
    }
  }
  last_transport_ = chosen;
  return *transport;
}

std::unique_ptr<MessageTransport> RingGroup::make_transport(const std::string& name,
                                                            c10::Device device) {
#ifdef RINGATTN_WITH_CUDA
  if (name == "nccl") return make_nccl_transport(*this, device);
  if (name == "symmetric") return make_symmetric_transport(*this, device);
#endif
  return peers_->transport(*this, device);
}

CollectiveTransport& RingGroup::collectives(c10::Device device) {
  return static_cast<CollectiveTransport&>(
      transport(device.is_cuda() ? "nccl" : "process_group", device));
}

std::string RingGroup::choose_transport(c10::Device device) {
#ifdef RINGATTN_WITH_CUDA
  if (!device.is_cuda()) return "process_group";
  if (chosen_.empty()) {
    try {
      transport("symmetric", device);
      chosen_ = "symmetric";
    } catch (const c10::Error&) {
      throw_if_failed();  // a rank is gone; otherwise all ranks were told that it cannot be
      chosen_ = "nccl";
    }
  }
  return chosen_;
#else
  return "process_group";
#endif
}

std::string RingGroup::reason_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

void RingGroup::synchronize() {
  Watchdog::get().drain(this);
  for (const auto& [name, transport] : transports_) {
    if (transport) transport->synchronize();
  }
  throw_if_failed();
}

bool RingGroup::idle() {
  for (const auto& [name, transport] : transports_) {
    try {
      if (transport && !transport->idle()) return false;
    } catch (const std::exception&) {
      // The device has failed, and all that was on it has come to its end.
    }
  }
  return true;
}

void check_transport(const std::string& name, c10::DeviceType device_type) {
#ifdef RINGATTN_WITH_CUDA
  constexpr bool kWithCuda = true;
#else
  constexpr bool kWithCuda = false;
#endif
  if (name == "auto" || name == "process_group") return;
  TORCH_CHECK(name == "nccl" || name == "symmetric",
              "ringattn: transport must be \"auto\", \"process_group\", \"nccl\" or "
              "\"symmetric\", got \"",
              name, "\"");
  TORCH_CHECK(kWithCuda,
              "ringattn: transport must be \"auto\" or \"process_group\" in a build without CUDA, "
              "got \"",
              name, "\"");
  TORCH_CHECK(device_type == c10::kCUDA, "ringattn: transport \"", name,
              "\" must be given CUDA tensors, got ", device_type, " tensors");
}

}  // namespace ringattn
