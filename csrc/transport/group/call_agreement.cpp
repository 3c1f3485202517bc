// SPDX-License-Identifier: Apache-2.0
#include "transport/group/call_agreement.h"

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

namespace ringattn {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// First letter of what a rank publishes: its signature follows, or why it refuses the call, failed
// in it, or left it.
constexpr char kRequest = 'a', kRefusal = 'r', kFailure = 'f', kLeave = 'l';

// How long a rank that has read a difference waits for the statements of the other ranks, so that
// all ranks throw the same error.
constexpr auto kSettle = milliseconds(300);
// How long one look at the store may wait for a key.
constexpr auto kLook = milliseconds(100);
// More published keys than a peer can have missed since it last looked.
constexpr size_t kMaxPublished = 64;

char type_of(const std::string& statement) { return statement.empty() ? '\0' : statement.front(); }

std::string key(int64_t call, int64_t rank) {
  return "call/" + std::to_string(call) + "/" + std::to_string(rank);
}

// Which untagged call a rank compares or has compared last.
std::string compared_key(int64_t rank) { return "compared/" + std::to_string(rank); }

// Which call a rank has refused last.
std::string refused_key(int64_t rank) { return "refused/" + std::to_string(rank); }

struct Difference {
  std::string name, mine, theirs;
};

// The same on every rank, whatever its standard library (FNV-1a).
uint32_t hash(const std::string& text, uint32_t begin = 2166136261u) {
  for (const char c : text) begin = (begin ^ static_cast<unsigned char>(c)) * 16777619u;
  return begin;
}

Difference first_difference(const std::string& mine, const std::string& theirs) {
  std::istringstream my_lines(mine), their_lines(theirs);
  std::string my_line, their_line;
  while (std::getline(my_lines, my_line) && std::getline(their_lines, their_line)) {
    if (my_line == their_line) continue;
    const auto value = [](const std::string& line) { return line.substr(line.find('=') + 1); };
    return {my_line.substr(0, my_line.find('=')), value(my_line), value(their_line)};
  }
  return {"call", mine, theirs};
}

// The first line of a request: in how many untagged calls its rank has been.
constexpr int64_t kTagged = -1;
std::string calls_line(int64_t calls_before) {
  return "calls before=" + std::to_string(calls_before) + "\n";
}
bool is_tagged(const std::string& line) { return line == calls_line(kTagged); }

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n') + 1); }

}  // namespace

bool CallAgreement::knows(const Signature& signature) const {
  return agreed_.count(signature.kind()) > 0;
}

bool CallAgreement::join_known(int64_t call, const std::shared_ptr<const Signature>& signature,
                               bool tagged, c10::function_ref<bool()> compares_tag) {
  if (compare_known_ && !tagged) return false;
  auto agreed = agreed_.find(signature->key());
  if (agreed == agreed_.end()) {
    if (!knows(*signature) || !(tagged || compares_tag())) return false;
    agreed = remember(signature->key(), hash(signature->text()));
  }
  begin(call, agreed->second, signature, tagged);
  last_known_ = call;
  return true;
}

CallAgreement::Agreed::iterator CallAgreement::remember(std::string key, uint32_t text_hash) {
  if (agreed_.size() >= kMaxAgreed || agreed_bytes_ > kMaxAgreedBytes) {
    agreed_.clear();
    agreed_bytes_ = 0;
  }
  const auto [place, is_new] = agreed_.emplace(std::move(key), text_hash);
  if (is_new) agreed_bytes_ += place->first.size();
  return place;
}

void CallAgreement::join(int64_t call, std::shared_ptr<const Signature> signature, bool tagged,
                         c10::function_ref<void(int64_t)> poll) {
  const uint32_t text_hash = compare(call, *signature, tagged ? kTagged : untagged_calls_, poll);
  remember(signature->kind(), 0);
  remember(signature->key(), text_hash)->second = text_hash;
  begin(call, text_hash, std::move(signature), tagged);
  last_compared_ = call;
}

void CallAgreement::begin(int64_t call, uint32_t text_hash,
                          std::shared_ptr<const Signature> signature, bool tagged) {
  call_hash_ = text_hash;
  message_hash_ = hash(std::to_string(call), call_hash_);
  const std::lock_guard<std::mutex> lock(begin_mutex_);
  recent_[call % recent_.size()] = {call, tagged ? kTagged : untagged_calls_, std::move(signature)};
  if (!tagged) ++untagged_calls_;
}

uint32_t CallAgreement::compare(int64_t call, const Signature& signature, int64_t calls_before,
                                c10::function_ref<void(int64_t)> poll) {
  compare_known_ = true;  // stays where this throws
  const std::string mine = statement(signature, calls_before);
  publish(call, mine);
  if (calls_before != kTagged) {
    backend_->put(compared_key(backend_->rank()), std::to_string(call));
  }

  // All statements are read before any is judged, so that every rank throws the same error. Where
  // one differs, a rank that is not in this call may never publish its own.
  auto deadline = Clock::now() + backend_->timeout() * 4 / 5;
  bool settling = false;
  Statements statements(backend_->size());
  for (;;) {
    read_missing(call, statements);
    const auto missing = std::find(statements.begin(), statements.end(), std::nullopt);
    if (missing == statements.end()) break;
    if (!settling && differs(statements, mine)) {
      settling = true;
      deadline = std::min(deadline, Clock::now() + kSettle);
    }
    if (Clock::now() >= deadline) break;
    const int64_t rank = missing - statements.begin();
    *missing = backend_->get_until(key(call, rank), std::min(deadline, Clock::now() + kLook));
    if (!*missing) poll(rank);
  }
  if (const auto verdict = judge(statements)) {
    TORCH_CHECK_WITH(DistBackendError, !verdict->ends_group, verdict->sentence);
    TORCH_CHECK(false, "ringattn: ", verdict->sentence);
  }
  const auto missing = std::find(statements.begin(), statements.end(), std::nullopt);
  TORCH_CHECK_WITH(DistBackendError, missing == statements.end(), "rank ",
                   missing - statements.begin(), " did not come to step 0 of ",
                   signature.operation(), " within the group's timeout of ",
                   backend_->timeout().count(), " ms");
  compare_known_ = false;

  // Every rank has published for this call, so none compares an earlier one. Note: why this rank
  // did not take part in one stays, a peer reads it only when it waits for a rotation.
  std::erase_if(published_, [&](const Published& earlier) {
    if (!earlier.is_request || earlier.key == key(call, backend_->rank())) return false;
    backend_->remove(earlier.key);
    return true;
  });
  return hash(signature.text());
}

std::optional<CallAgreement::Verdict> CallAgreement::judge(const Statements& statements) const {
  std::optional<int64_t> first;  // rank whose statement is the one to compare with
  for (int64_t rank = 0; rank < backend_->size(); ++rank) {
    if (!statements[rank]) continue;
    if (!first) first = rank;
    const char type = type_of(*statements[rank]);
    const std::string rest = statements[rank]->substr(statements[rank]->empty() ? 0 : 1);
    if (type == kRefusal || type == kFailure) {
      return Verdict{"rank " + std::to_string(rank) + ": " + rest};
    }
    if (type == kLeave) return Verdict{rest};
    if (type != kRequest) {
      return Verdict{"the group's store must keep what ranks publish, got \"" + *statements[rank] +
                         "\" for rank " + std::to_string(rank) +
                         "; the group cannot be used any more",
                     /*ends_group=*/true};
    }
  }
  for (int64_t rank = 0; rank < backend_->size(); ++rank) {
    if (!statements[rank] || *statements[rank] == *statements[*first]) continue;
    const std::string one = statements[*first]->substr(1), other = statements[rank]->substr(1);
    const std::string before = first_line(one), other_before = first_line(other);
    const bool out_of_step =
        before != other_before && !is_tagged(before) && !is_tagged(other_before);
    const Difference difference = out_of_step ? first_difference(before, other_before)
                                              : first_difference(one.substr(before.size()),
                                                                 other.substr(other_before.size()));
    const std::string got = ", got " + difference.mine + " on rank " + std::to_string(*first) +
                            " and " + difference.theirs + " on rank " + std::to_string(rank);
    // A rank refused a known call while others made it: from there on a rank would take blocks of
    // one call for those of another.
    if (out_of_step) {
      return Verdict{"ranks must have made the same calls" + got +
                         ", one of which was refused; the group cannot be used any more",
                     /*ends_group=*/true};
    }
    return Verdict{"ranks must agree on " + difference.name + got};
  }
  return {};
}

std::string CallAgreement::statement(const Signature& signature, int64_t calls_before) {
  return kRequest + calls_line(calls_before) + signature.text();
}

bool CallAgreement::differs(const Statements& statements, const std::string& mine) const {
  return std::any_of(statements.begin(), statements.end(),
                     [&](const std::optional<std::string>& theirs) {
                       return theirs.has_value() && *theirs != mine;
                     });
}

// Fills in what has been published since.
void CallAgreement::read_missing(int64_t call, Statements& statements) {
  for (int64_t rank = 0; rank < backend_->size(); ++rank) {
    if (!statements[rank]) statements[rank] = backend_->get(key(call, rank), milliseconds(0));
  }
}

void CallAgreement::refuse(int64_t call, const std::string& message) {
  compare_known_ = true;
  // A peer may still be in the call before, which this rank publishes in no later one.
  publish_asked(call - 1);
  publish(call, kRefusal + message);
  backend_->put(refused_key(backend_->rank()), std::to_string(call));
}

void CallAgreement::fail(int64_t call, const std::string& reason) {
  compare_known_ = true;
  publish(call, kFailure + reason);
}

void CallAgreement::leave(int64_t call, const std::string& sentence) {
  compare_known_ = true;
  publish(call, kLeave + sentence);
}

void CallAgreement::publish_request(int64_t call) {
  // The call before, too: a peer may still be in it, and wait for a message that this rank did not
  // send.
  publish_asked(call - 1);
  publish_asked(call);
}

void CallAgreement::publish_asked(int64_t call) {
  const Recent* request = recent(call);
  if (request != nullptr && find_published(key(call, backend_->rank())) == published_.end()) {
    publish(call, statement(*request->signature, request->calls_before));
  }
}

std::optional<std::string> CallAgreement::objection(int64_t call,
                                                    const std::vector<int64_t>& peers) {
  const Recent* request = recent(call);
  const std::string mine =
      request != nullptr ? statement(*request->signature, request->calls_before) : "";
  Statements statements(backend_->size());
  for (const int64_t rank : peers) {
    auto theirs = backend_->get(key(call, rank), milliseconds(0));
    if (!theirs || *theirs == mine || type_of(*theirs) == kFailure) continue;
    if (type_of(*theirs) == kRequest && mine.empty()) continue;
    statements[rank] = std::move(theirs);
  }
  if (std::all_of(statements.begin(), statements.end(),
                  [](const auto& statement) { return !statement; }))
    return {};
  if (!mine.empty()) {
    statements[backend_->rank()] = mine;
    const auto deadline = Clock::now() + kSettle;
    const auto is_missing = [](const auto& statement) { return !statement; };
    for (; Clock::now() < deadline; std::this_thread::sleep_for(milliseconds(10))) {
      read_missing(call, statements);
      if (std::none_of(statements.begin(), statements.end(), is_missing)) break;
    }
  }
  const auto verdict = judge(statements);
  return verdict ? std::optional<std::string>(verdict->sentence) : std::nullopt;
}

int32_t CallAgreement::message_tag(int64_t step) const {
  return static_cast<int32_t>(hash(std::to_string(step), message_hash_) & 0x7fffffffu);
}

int32_t CallAgreement::call_tag() const { return static_cast<int32_t>(call_hash_ & 0x7fffffffu); }

const CallAgreement::Recent* CallAgreement::recent(int64_t call) const {
  if (call < 0) return nullptr;
  const Recent& found = recent_[call % recent_.size()];
  return found.call == call ? &found : nullptr;
}

std::optional<std::string> CallAgreement::operation(int64_t call) const {
  const Recent* request = recent(call);
  return request != nullptr ? std::optional<std::string>(request->signature->operation())
                            : std::nullopt;
}

std::optional<CallAgreement::Absence> CallAgreement::absence(int64_t call, int64_t rank) {
  const auto statement = backend_->get(key(call, rank), milliseconds(0));
  if (!statement || (type_of(*statement) != kRefusal && type_of(*statement) != kFailure)) return {};
  return Absence{type_of(*statement) == kRefusal, statement->substr(1)};
}

std::optional<int64_t> CallAgreement::announced(const std::string& key) {
  const auto text = backend_->get(key, milliseconds(0));
  const int64_t number = text ? std::stoll(*text) : -1;
  return number > last_compared_ && number <= last_known_ ? std::optional(number) : std::nullopt;
}

bool CallAgreement::began_untagged(int64_t number) {
  const std::lock_guard<std::mutex> lock(begin_mutex_);
  const Recent& found = recent_[number % recent_.size()];
  return found.call > number || (found.call == number && found.calls_before != kTagged);
}

std::optional<std::string> CallAgreement::obstacle(int64_t call, int64_t rank) {
  const std::string other = "rank " + std::to_string(rank),
                    end = "; the group cannot be used any more";
  auto absent = absence(call, rank);
  if (!absent) {
    // Of an earlier call: this rank's host may be ahead.
    const auto refused = announced(refused_key(rank));
    if (refused && began_untagged(*refused)) absent = absence(*refused, rank);
  }
  if (absent && absent->refused) {
    return other + " refused a call that other ranks have begun: " + absent->why + end;
  }
  const auto compared = announced(compared_key(rank));
  if (!compared) return {};
  const int64_t number = *compared;
  const auto theirs = backend_->get(key(number, rank), milliseconds(0));
  if (!theirs || type_of(*theirs) != kRequest) return {};
  Statements statements(backend_->size());
  statements[rank] = theirs;
  {
    const std::lock_guard<std::mutex> lock(begin_mutex_);
    const Recent* request = recent(number);
    if (request == nullptr) {
      return "ranks must make the same calls in the same order, got one on " + other +
             " that is new to it, and one on rank " + std::to_string(backend_->rank()) +
             " that it has made before" + end;
    }
    statements[backend_->rank()] = statement(*request->signature, request->calls_before);
  }
  const auto verdict = judge(statements);
  if (!verdict) return {};
  return verdict->sentence + (verdict->ends_group ? "" : end);
}

void CallAgreement::publish(int64_t call, const std::string& text) {
  const std::string name = key(call, backend_->rank());
  backend_->put(name, text);
  auto published = find_published(name);
  if (published == published_.end()) published = published_.insert(published, {name});
  published->is_request = type_of(text) == kRequest;
  if (published_.size() <= kMaxPublished) return;
  backend_->remove(published_.front().key);
  published_.pop_front();
}

std::deque<CallAgreement::Published>::iterator CallAgreement::find_published(
    const std::string& name) {
  return std::find_if(published_.begin(), published_.end(),
                      [&](const Published& each) { return each.key == name; });
}

}  // namespace ringattn
