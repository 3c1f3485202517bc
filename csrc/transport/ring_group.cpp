// SPDX-License-Identifier: Apache-2.0
#include "transport/ring_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "core/process_wide.h"
#include "transport/watchdog.h"

#ifdef RINGATTN_WITH_CUDA
#include "transport/nccl.h"
#include "transport/symmetric.h"
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

// Where a rank that waits in vain says for whom. A group fails once, so one word per rank is
// enough.
std::string failed_key(int64_t rank) { return "failed/" + std::to_string(rank); }

// Several where survivors that have not noticed yet are as silent as who is gone.
std::string one_of(const std::vector<int64_t>& ranks) {
  std::string who;
  for (const int64_t rank : ranks) {
    who += (who.empty() ? "rank " : " or rank ") + std::to_string(rank);
  }
  return who;
}

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

int64_t RingGroup::begin_carried_call(c10::Device device, const Signature& signature) {
  return begin_call([&] {
    check_device(device, "process_group");
    return signature;
  });
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

std::vector<std::string> RingGroup::exchange(const std::string& mine) {
  const auto key = [&](int64_t number, int64_t rank) {
    return "exchange/" + std::to_string(number) + "/" + std::to_string(rank);
  };
  const int64_t number = num_exchanges_++;
  peers_->put(key(number, rank()), mine);
  const auto deadline = std::chrono::steady_clock::now() + peers_->timeout() * 4 / 5;
  std::vector<std::string> words;
  for (int64_t other = 0; other < size(); ++other) {
    const auto word = peers_->get_until(key(number, other), deadline);
    if (!word) {
      fail("rank " + std::to_string(other) + " did not come to step 0 of the ring within the " +
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
      if (reason_of(error).rfind(kPrefix, 0) != 0) fail_call(next_call_ - 1, error);
      throw;
    }
    devices_.emplace(device.type(), device);
  }
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

void RingGroup::fail_call(int64_t call, const std::exception& error) {
  if (failed_) return;
  const std::string reason = reason_of(error);
  try {
    agreement_.fail(call, reason);
  } catch (const std::exception&) {
    // The store is gone; the others will find out by themselves.
  }
  fail("rank " + std::to_string(rank()) +
       " failed in a call, and is out of step with the others: " + reason +
       "; the group cannot be used any more");
}

std::string RingGroup::blame(int64_t call, int64_t step, const std::vector<int64_t>& suspects,
                             const std::string& reason) {
  return blame(call, "step " + std::to_string(step) + " of the ring", suspects, reason);
}

std::string RingGroup::blame(int64_t call, const std::string& place,
                             const std::vector<int64_t>& suspects, const std::string& reason) {
  // Of several none may be silent: all have noticed that something is wrong.
  std::vector<int64_t> blamed;
  if (suspects.size() == 1) blamed = suspects;
  std::string said;
  try {
    const std::vector<int64_t> silent = most_suspected(suspects);
    if (!silent.empty()) blamed = silent;
    for (const int64_t rank : suspects) {
      const auto absence = agreement_.absence(call, rank);
      if (!absence) continue;
      // Who failed may have done so because of who is gone.
      if (absence->refused) blamed = {rank};
      said = ", rank " + std::to_string(rank) +
             (absence->refused ? " refused the call: " : " failed in the call: ") + absence->why;
      if (absence->refused) break;
    }
  } catch (const std::exception&) {
    // The store may have gone with the rank that died; then the suspects are all that is known.
  }
  std::string sentence = (blamed.empty() ? "a rank" : one_of(blamed)) + " did not take part in " +
                         place + " within the group's timeout of " +
                         std::to_string(peers_->timeout().count()) + " ms" + said;
  return sentence + " (" + reason + "); the group cannot be used any more";
}

void RingGroup::end(const std::string& operation, const std::string& reason) {
  throw_if_failed();
  fail(blame(next_call_ - 1, "step 0 of " + operation, others(), reason));
  throw_if_failed();
}

std::vector<int64_t> RingGroup::most_suspected(const std::vector<int64_t>& suspects) {
  // Ranks that wait in vain say so. Among those that say nothing, whom most of the others wait for
  // is the one that is gone; the others have only not noticed yet. Several where as many wait.
  std::string mine;
  for (const int64_t suspect : suspects) mine += std::to_string(suspect) + " ";
  peers_->put(failed_key(rank()), mine);
  const auto deadline = std::chrono::steady_clock::now() +
                        std::min(peers_->timeout() / 5, std::chrono::milliseconds(2000));
  std::vector<int64_t> votes(size(), 0);
  std::vector<bool> silent(size(), true);
  silent[rank()] = false;
  for (const int64_t suspect : suspects) ++votes[suspect];
  // Suspects first: they are worth waiting for, the rest have had the same time by then.
  std::vector<int64_t> asked = suspects;
  for (const int64_t other : others()) {
    if (!std::count(asked.begin(), asked.end(), other)) asked.push_back(other);
  }
  for (const int64_t other : asked) {
    const auto word = peers_->get_until(failed_key(other), deadline);
    if (!word) continue;
    silent[other] = false;
    std::istringstream waits_for(*word);
    for (int64_t suspect; waits_for >> suspect;) {
      if (suspect >= 0 && suspect < size()) ++votes[suspect];
    }
  }
  std::vector<int64_t> blamed;
  int64_t most = 1;
  for (const int64_t other : asked) {
    if (!silent[other] || votes[other] < most) continue;
    if (votes[other] > most) blamed.clear();
    most = votes[other];
    blamed.push_back(other);
  }
  return blamed;
}

void RingGroup::fail(const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) return;
  failure_ = message;
  failed_ = true;
}

void RingGroup::throw_if_failed() {
  if (!failed_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, false, failure_);
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
