// SPDX-License-Identifier: Apache-2.0
// How a group learns that a wait is in vain, and how it ends.

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "transport/group/ring_group.h"

namespace ringattn {
namespace {

// Where a rank that waits in vain says for whom. A group fails once, so one word per rank is
// enough.
std::string failed_key(int64_t rank) { return "failed/" + std::to_string(rank); }

// Why the group has ended on a rank, for peers that wait for it.
std::string ended_key(int64_t rank) { return "ended/" + std::to_string(rank); }

}  // namespace

void RingGroup::look_for_news(int64_t call, const std::vector<int64_t>& peers,
                              const std::string& place) {
  if (!peers_->store_is_alive()) return lose_store(place);
  for (const int64_t peer : peers) {
    if (const auto why = peers_->get(ended_key(peer), std::chrono::milliseconds(0))) fail(*why);
  }
  throw_if_failed();
  if (call == PeerWait::kNoCall) return;
  agreement_.show(call);
  if (const auto objection = agreement_.objection(call, peers)) {
    agreement_.leave(call, *objection);
    throw CallLeft("ringattn: " + *objection, /*backtrace=*/nullptr);
  }
}

std::optional<std::string> RingGroup::ended_by(int64_t call, const std::vector<int64_t>& peers) {
  if (!peers_->store_is_alive()) return {};
  for (const int64_t peer : peers) {
    if (auto why = peers_->get(ended_key(peer), std::chrono::milliseconds(0))) return why;
    const auto absence = agreement_.absence(call, peer);
    if (absence && absence->refused) {
      return "rank " + std::to_string(peer) +
             " refused a call that other ranks have begun: " + absence->why +
             "; the group cannot be used any more";
    }
  }
  return {};
}

void RingGroup::lose(int64_t call, int64_t peer, const std::string& place,
                     const std::string& reason) {
  look_for_news(call, {peer}, place);  // a rank that leaves says why before its connections close
  const auto closed = [&](const char* said) { return reason.find(said) != std::string::npos; };
  const bool by_peer = closed("closed by peer") || closed("reset by peer") || closed("Broken pipe");
  fail("rank " + std::to_string(peer) +
       (by_peer ? " closed its connection in " + place
                : " could not be reached in " + place + " (" + reason + ")") +
       "; the group cannot be used any more");
  throw_if_failed();
}

void RingGroup::check_connections(const std::vector<int64_t>& peers, const std::string& place) {
  for (const int64_t peer : peers) {
    if (!peers_->is_connected(peer)) lose(PeerWait::kNoCall, peer, place, "closed by peer");
  }
}

void RingGroup::lose_store(const std::string& place) {
  // The store goes with the rank that holds it, which has more to do with it than its peers.
  std::vector<int64_t> gone;
  for (const int64_t other : others()) {
    if (!peers_->is_connected(other)) gone.push_back(other);
  }
  fail((gone.empty() ? "the process that holds the group's store" : one_of({gone.front()})) +
       " closed its connection in " + place + "; the group cannot be used any more");
  throw_if_failed();
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
                             const std::vector<int64_t>& named, const std::string& reason) {
  std::vector<int64_t> suspects;  // each once: in a ring of two, source and destination are one
  for (const int64_t rank : named) {
    if (!std::count(suspects.begin(), suspects.end(), rank)) suspects.push_back(rank);
  }
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
  look_for_news(PeerWait::kNoCall, others(), "step 0 of " + operation);
  check_connections(others(), "step 0 of " + operation);
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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;
    failure_ = message;
    failed_ = true;
  }
  try {
    if (peers_->store_is_alive()) peers_->put(ended_key(rank()), message);
  } catch (const std::exception&) {
    // The store is gone; peers find that out by themselves.
  }
}

void RingGroup::throw_if_failed() {
  if (!failed_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, false, failure_);
}

}  // namespace ringattn
