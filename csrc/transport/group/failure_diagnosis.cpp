// SPDX-License-Identifier: Apache-2.0
#include "transport/group/failure_diagnosis.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <utility>

namespace ringattn {
namespace {

// Key under which a rank whose wait has failed publishes the ranks that it waited for. A group
// fails once, so one key for each rank is enough.
std::string failed_key(int64_t rank) { return "failed/" + std::to_string(rank); }

// Key under which a rank publishes why the group has ended there, for peers that wait for it.
std::string ended_key(int64_t rank) { return "ended/" + std::to_string(rank); }

}  // namespace

FailureDiagnosis::FailureDiagnosis(std::shared_ptr<GroupBackend> backend,
                                   std::shared_ptr<CallAgreement> agreement)
    : backend_(std::move(backend)),
      agreement_(std::move(agreement)),
      others_(Rendezvous{backend_->rank(), backend_->size()}.others()) {}

std::string FailureDiagnosis::operation(int64_t call) const {
  return agreement_->operation(call).value_or("the ring");
}

void FailureDiagnosis::check_peers(int64_t call, const Ranks& peers, const std::string& place) {
  check_store(place);
  for (const int64_t peer : peers) {
    if (const auto why = backend_->get(ended_key(peer), std::chrono::milliseconds(0))) fail(*why);
  }
  throw_if_failed();
  if (call == kOutsideCalls) return;
  use_store(place, [&] {
    agreement_->publish_request(call);
    if (const auto objection = agreement_->objection(call, peers)) {
      agreement_->leave(call, *objection);
      throw CallLeft("ringattn: " + *objection, /*backtrace=*/nullptr);
    }
  });
}

std::optional<std::string> FailureDiagnosis::ended_by(int64_t call, const Ranks& peers) {
  if (!backend_->store_is_alive()) return {};
  for (const int64_t peer : peers) {
    if (auto why = backend_->get(ended_key(peer), std::chrono::milliseconds(0))) return why;
    if (auto why = agreement_->obstacle(call, peer)) return why;
  }
  return {};
}

std::optional<std::string> FailureDiagnosis::refused_next(const Ranks& peers) {
  if (!backend_->store_is_alive()) return {};
  for (const int64_t peer : peers) {
    const auto absence = agreement_->absence(agreement_->next_call(), peer);
    if (absence && absence->refused) {
      return "rank " + std::to_string(peer) +
             " refused a call while other ranks replay a CUDA graph: " + absence->why +
             "; the group cannot be used any more";
    }
  }
  return {};
}

void FailureDiagnosis::lose(int64_t call, int64_t peer, const std::string& place,
                            const std::string& reason) {
  check_peers(call, {peer}, place);  // a rank publishes why it leaves before its connections close
  const auto closed = [&](const char* text) { return reason.find(text) != std::string::npos; };
  const bool by_peer = closed("closed by peer") || closed("reset by peer") || closed("Broken pipe");
  fail("rank " + std::to_string(peer) +
       (by_peer ? " closed its connection in " + place
                : " could not be reached in " + place + " (" + reason + ")") +
       "; the group cannot be used any more");
  throw_if_failed();
}

void FailureDiagnosis::check_connections(const Ranks& peers, const std::string& place) {
  for (const int64_t peer : peers) {
    if (!backend_->is_connected(peer)) lose(kOutsideCalls, peer, place, "closed by peer");
  }
}

void FailureDiagnosis::check_store(const std::string& place) {
  if (backend_->store_is_alive()) return;
  // The store ends with the rank that holds it, as a rule the first one. The connections to other
  // ranks may be closed as a consequence.
  std::vector<int64_t> gone;
  for (const int64_t other : others_) {
    if (!backend_->is_connected(other)) gone.push_back(other);
  }
  fail((gone.empty() ? "the process that holds the group's store" : one_of({gone.front()})) +
       " closed its connection in " + place + "; the group cannot be used any more");
  throw_if_failed();
}

void FailureDiagnosis::use_store(const std::string& place, c10::function_ref<void()> use) {
  try {
    use();
  } catch (const c10::DistBackendError&) {
    check_store(place);
    throw;
  }
}

void FailureDiagnosis::fail_call(int64_t call, const std::exception& error) {
  if (failed_) return;
  const std::string reason = reason_of(error);
  try {
    agreement_->fail(call, reason);
  } catch (const std::exception&) {
    // The store is gone: peers detect that themselves.
  }
  fail("rank " + std::to_string(backend_->rank()) +
       " failed in a call, and is out of step with the others: " + reason +
       "; the group cannot be used any more");
}

std::string FailureDiagnosis::blame(int64_t call, const std::string& place, const Ranks& named,
                                    const std::string& reason) {
  std::vector<int64_t> suspects;  // each once: of two ranks, source and destination are the same
  for (const int64_t rank : named) {
    if (!std::count(suspects.begin(), suspects.end(), rank)) suspects.push_back(rank);
  }
  // Of several suspects possibly none is silent: then all of them have detected a failure.
  std::vector<int64_t> blamed;
  if (suspects.size() == 1) blamed = suspects;
  std::string detail;
  try {
    const std::vector<int64_t> silent = most_suspected(suspects);
    if (!silent.empty()) blamed = silent;
    for (const int64_t rank : suspects) {
      const auto absence = agreement_->absence(call, rank);
      if (!absence) continue;
      // A rank may have failed because another one is gone.
      if (absence->refused) blamed = {rank};
      detail = ", rank " + std::to_string(rank) +
               (absence->refused ? " refused the call: " : " failed in the call: ") + absence->why;
      if (absence->refused) break;
    }
  } catch (const std::exception&) {
    // The store may have ended with the rank that died: then only the suspects are known.
  }
  std::string sentence = (blamed.empty() ? "a rank" : one_of(blamed)) + " did not take part in " +
                         place + " within the group's timeout of " +
                         std::to_string(backend_->timeout().count()) + " ms" + detail;
  return sentence + " (" + reason + "); the group cannot be used any more";
}

void FailureDiagnosis::end(int64_t call, const std::string& operation, const std::string& reason) {
  const std::string place = "step 0 of " + operation;
  throw_if_failed();
  check_peers(kOutsideCalls, others_, place);
  check_connections(others_, place);
  fail(blame(call, place, others_, reason));
  throw_if_failed();
}

FailureDiagnosis::Ranks FailureDiagnosis::most_suspected(const Ranks& suspects) {
  // A rank whose wait has failed publishes the ranks that it waited for. Of the ranks that have
  // published nothing, the one that most ranks wait for is gone; the others have not detected the
  // failure yet. Several ranks are returned where equally many wait for each.
  std::string mine;
  for (const int64_t suspect : suspects) mine += std::to_string(suspect) + " ";
  backend_->put(failed_key(backend_->rank()), mine);
  const auto deadline = std::chrono::steady_clock::now() +
                        std::min(backend_->timeout() / 5, std::chrono::milliseconds(2000));
  const int64_t size = backend_->size();
  std::vector<int64_t> votes(size, 0);
  std::vector<bool> silent(size, true);
  silent[backend_->rank()] = false;
  for (const int64_t suspect : suspects) ++votes[suspect];
  // Suspects first: the time is spent waiting for them, and the others have had it too by then.
  std::vector<int64_t> candidates = suspects;
  for (const int64_t other : others_) {
    if (!std::count(candidates.begin(), candidates.end(), other)) candidates.push_back(other);
  }
  for (const int64_t other : candidates) {
    const auto named = backend_->get_until(failed_key(other), deadline);
    if (!named) continue;
    silent[other] = false;
    std::istringstream waits_for(*named);
    for (int64_t suspect; waits_for >> suspect;) {
      if (suspect >= 0 && suspect < size) ++votes[suspect];
    }
  }
  std::vector<int64_t> blamed;
  int64_t most = 1;
  for (const int64_t other : candidates) {
    if (!silent[other] || votes[other] < most) continue;
    if (votes[other] > most) blamed.clear();
    most = votes[other];
    blamed.push_back(other);
  }
  return blamed;
}

void FailureDiagnosis::fail(const std::string& message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;
    failure_ = message;
    failed_ = true;
  }
  try {
    if (backend_->store_is_alive()) backend_->put(ended_key(backend_->rank()), message);
  } catch (const std::exception&) {
    // The store is gone: peers detect that themselves.
  }
}

void FailureDiagnosis::throw_if_failed() {
  if (!failed_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, false, failure_);
}

}  // namespace ringattn
