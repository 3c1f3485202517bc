// SPDX-License-Identifier: Apache-2.0
#include "transport/group/group_context.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "core/log.h"
#include "core/process_singleton.h"
#include "core/refusal.h"
#include "transport/group/peer_wait.h"
#include "transport/registry.h"
#include "transport/runtime/watchdog.h"

namespace ringattn {
namespace {

struct Groups {
  std::mutex making;  // held while one is made
  std::mutex mutex;   // guards what follows
  std::map<std::string, std::shared_ptr<GroupContext>> by_name;
  std::vector<std::shared_ptr<GroupContext>> ending;  // destroyed groups with work under way
};

Groups& groups() { return process_singleton<Groups>(); }

}  // namespace

std::shared_ptr<GroupContext> GroupContext::find(const std::string& name) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  const auto found = groups().by_name.find(name);
  if (found == groups().by_name.end() || !found->second->is_current()) return nullptr;
  return found->second;
}

std::shared_ptr<GroupContext> GroupContext::resolve(const std::string& name) {
  if (auto group = find(name)) return group;
  // Made once, also where several threads call: a rank that had made two would be out of step with
  // the others. Making one reads the store, so the lock of the map is not held.
  const std::lock_guard<std::mutex> one_at_a_time(groups().making);
  if (auto group = find(name)) return group;
  collect();
  auto group = std::make_shared<GroupContext>(find_backend(name));
  const std::lock_guard<std::mutex> lock(groups().mutex);
  groups().by_name[name] = group;
  Watchdog::get().every_half_second(&GroupContext::collect);
  return group;
}

void GroupContext::collect() {
  std::vector<std::shared_ptr<GroupContext>>
      dead;  // destroyed outside the lock: communicators take a while
  Groups& all = groups();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& by_name = all.by_name;
  auto& ending = all.ending;
  for (auto entry = by_name.begin(); entry != by_name.end();) {
    if (entry->second->is_current()) {
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

GroupContext::GroupContext(std::shared_ptr<GroupBackend> backend)
    : backend_(std::move(backend)),
      agreement_(std::make_shared<CallAgreement>(backend_)),
      failures_(std::make_shared<FailureDiagnosis>(backend_, agreement_)),
      rendezvous_{backend_->rank(), backend_->size(), backend_->timeout(),
                  [this](const std::string& mine) { return exchange(mine); }, failures_} {}

void GroupContext::enter(const char* operation) {
  const char* other = nullptr;
  TORCH_CHECK(under_way_.compare_exchange_strong(other, operation),
              "ringattn: a group must be in one call at a time, got ", operation, " while ", other,
              " is under way; give each thread a group of its own (torch.distributed.new_group)");
}

int64_t GroupContext::begin_call(std::shared_ptr<const Signature> signature, bool tagged,
                                 c10::function_ref<bool()> compares_tag) {
  failures_->throw_if_failed();
  const int64_t call = agreement_->number_call();
  if (agreement_->join_known(call, signature, tagged, compares_tag)) return call;
  PeerWait wait(rendezvous_, kOutsideCalls, /*step=*/0, {}, signature->operation());
  try {
    failures_->use_store(wait.place(), [&] {
      agreement_->join(call, std::move(signature), tagged, [&](int64_t rank) {
        wait.set_peers({rank});
        wait.poll();
      });
    });
  } catch (const c10::DistBackendError& error) {
    failures_->fail(reason_of(error));  // a rank that joins later must not wait for this one
    failures_->throw_if_failed();       // with the first reason
  }
  return call;
}

void GroupContext::refuse_call(const std::string& message) {
  const int64_t call = agreement_->number_call();
  if (backend_->store_is_alive()) agreement_->refuse(call, sentence_of(message));
}

void GroupContext::check_device(c10::Device device, const std::string& transport) const {
  const auto known = devices_.find(device.type());
  TORCH_CHECK(known == devices_.end() || known->second == device, "ringattn: tensors must be on ",
              known->second, ", where this group's first ones were, got ", device);
  if (device.is_cpu() || transport == group_transport()) {
    TORCH_CHECK(backend_->carries(device.type()),
                "ringattn: group must have a backend for tensors on ",
                c10::DeviceTypeName(device.type(), /*lower_case=*/true), ", got one that has none");
  }
}

std::vector<std::string> GroupContext::exchange(const std::string& mine) {
  PeerWait wait(rendezvous_, kOutsideCalls, /*step=*/0, {}, failures_->operation(latest_call()));
  return exchange(mine, "exchange/" + std::to_string(num_exchanges_++), wait);
}

std::vector<std::string> GroupContext::exchange_in_call(const std::string& mine,
                                                        const char* operation) {
  const int64_t call = begin_call(std::make_shared<const Signature>(operation), /*tagged=*/true);
  PeerWait wait(rendezvous_, call, /*step=*/0, {});
  wait.test_connections();
  return exchange(mine, "in_call/" + std::to_string(call), wait);
}

std::vector<std::string> GroupContext::exchange(const std::string& mine, const std::string& name,
                                                PeerWait& wait) {
  const auto key = [&](int64_t rank) { return name + "/" + std::to_string(rank); };
  constexpr auto kLook = std::chrono::milliseconds(100);
  failures_->check_store(wait.place());
  failures_->use_store(wait.place(), [&] { backend_->put(key(rank()), mine); });
  std::vector<std::string> gathered;
  for (int64_t other = 0; other < size(); ++other) {
    wait.set_peers({other});
    auto theirs = backend_->get(key(other), std::min(kLook, backend_->timeout() / 5));
    while (!theirs && !wait.expired()) {
      wait.poll();
      theirs = backend_->get(key(other), std::min(kLook, backend_->timeout() / 5));
    }
    if (!theirs) {
      failures_->fail("rank " + std::to_string(other) + " did not come to " + wait.place() +
                      " within the " + "group's timeout of " +
                      std::to_string(backend_->timeout().count()) +
                      " ms; the group cannot be used any more");
    }
    failures_->throw_if_failed();
    gathered.push_back(*theirs);
  }
  // Every rank has published its string, so every rank has read those of the exchanges before.
  for (const std::string& earlier : exchanged_) backend_->remove(earlier);
  exchanged_ = {key(rank())};
  return gathered;
}

MessageTransport& GroupContext::transport(const std::string& name, c10::Device device) {
  check_transport(name, device.type());
  const std::string chosen = name == "auto" ? choose_transport(device) : name;
  const auto entry = transports_.try_emplace({chosen, device.type()}).first;
  auto& transport = entry->second;
  if (!transport) {
    try {
      const auto make = find_transport(chosen).make;
      transport =
          make != nullptr ? make(rendezvous_, device) : backend_->transport(rendezvous_, device);
    } catch (const std::exception& error) {
      // A refusal is thrown on all ranks. A failure of this rank alone leaves the others waiting.
      if (!is_refusal(reason_of(error))) failures_->fail_call(latest_call(), error);
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
  latest_ = &*entry;
  return *transport;
}

CollectiveTransport& GroupContext::collectives(c10::Device device) {
  const std::string name = automatic_transports(device.type()).back();
  CollectiveTransport* found = transport(name, device).collectives();
  TORCH_INTERNAL_ASSERT(found != nullptr, name, " must have collectives");
  return *found;
}

CollectiveTransport& GroupContext::own_transport(c10::Device device) {
  const auto latest = latest_;
  auto& own = *transport(group_transport(), device).collectives();
  latest_ = latest;
  return own;
}

const std::string& GroupContext::choose_transport(c10::Device device) {
  std::string& chosen = chosen_[device.type()];
  if (!chosen.empty()) return chosen;
  const auto candidates = automatic_transports(device.type());
  for (const std::string& name : candidates) {
    try {
      if (name != candidates.back()) transport(name, device);
      chosen = name;
      break;
    } catch (const c10::Error&) {
      failures_->throw_if_failed();  // a rank is gone; otherwise all ranks have thrown a refusal
    }
  }
  return chosen;
}

void GroupContext::synchronize() {
  for (const auto& [name, transport] : transports_) {
    if (transport) transport->synchronize();
  }
  failures_->throw_if_failed();
}

bool GroupContext::idle() {
  for (const auto& [name, transport] : transports_) {
    try {
      if (transport && !transport->idle()) return false;
    } catch (const std::exception&) {
      // The device has failed: nothing runs on it any more.
    }
  }
  return true;
}

}  // namespace ringattn
