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
constexpr char kAsks = 'a', kRefuses = 'r', kFails = 'f', kLeft = 'l';

// How long ranks that know of a difference wait for what the other ranks ask for, so that all of
// them say the same.
constexpr auto kSettle = milliseconds(300);
// How long one look at the store may wait for a key.
constexpr auto kLook = milliseconds(100);
// More published keys than a peer can have missed since it last looked.
constexpr size_t kMostPublished = 64;

char kind_of(const std::string& word) { return word.empty() ? '\0' : word.front(); }

std::string key(int64_t call, int64_t rank) {
  return "call/" + std::to_string(call) + "/" + std::to_string(rank);
}

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

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n') + 1); }

}  // namespace

bool Agreement::knows(const Signature& signature) const {
  return agreed_.count(signature.key()) > 0;
}

void Agreement::join(int64_t call, Signature signature, bool tagged,
                     c10::function_ref<void(int64_t)> poll) {
  const int64_t calls_before = tagged ? 0 : untagged_calls_;
  auto agreed = agreed_.find(signature.key());
  if (agreed == agreed_.end() || (meet_ && !tagged)) {
    const uint32_t text_hash = compare(call, signature, calls_before, poll);
    if (agreed_.size() >= kMostAgreed) agreed_.clear();
    agreed = agreed_.emplace(signature.key(), text_hash).first;
  }
  latest_kind_ = agreed->second;
  latest_ = hash(std::to_string(call), latest_kind_);
  if (!tagged) ++untagged_calls_;
  recent_[call % recent_.size()] = {call, calls_before, std::move(signature)};
}

uint32_t Agreement::compare(int64_t call, const Signature& signature, int64_t calls_before,
                            c10::function_ref<void(int64_t)> poll) {
  meet_ = true;  // should this fail
  const std::string mine = word(signature, calls_before);
  publish(call, mine);

  // Answers are read before any is judged, so that every rank has the same to say. Where one
  // differs, a rank that is not in this call may never answer.
  auto deadline = Clock::now() + peers_.timeout() * 4 / 5;
  bool settling = false;
  Words words(peers_.size());
  for (;;) {
    look(call, words);
    const auto missing = std::find(words.begin(), words.end(), std::nullopt);
    if (missing == words.end()) break;
    if (!settling && differs(words, mine)) {
      settling = true;
      deadline = std::min(deadline, Clock::now() + kSettle);
    }
    if (Clock::now() >= deadline) break;
    const int64_t rank = missing - words.begin();
    *missing = peers_.get_until(key(call, rank), std::min(deadline, Clock::now() + kLook));
    if (!*missing) poll(rank);
  }
  if (const auto verdict = judge(words)) {
    TORCH_CHECK_WITH(DistBackendError, !verdict->ends_group, verdict->sentence);
    TORCH_CHECK(false, "ringattn: ", verdict->sentence);
  }
  const auto missing = std::find(words.begin(), words.end(), std::nullopt);
  TORCH_CHECK_WITH(DistBackendError, missing == words.end(), "rank ", missing - words.begin(),
                   " did not come to step 0 of ", signature.operation(),
                   " within the group's timeout of ", peers_.timeout().count(), " ms");
  meet_ = false;

  // Every rank has come here, so every rank has read all that was said before.
  for (const std::string& earlier : published_) {
    if (earlier != key(call, peers_.rank())) peers_.remove(earlier);
  }
  published_ = {key(call, peers_.rank())};
  return hash(signature.text());
}

std::optional<Agreement::Verdict> Agreement::judge(const Words& words) const {
  std::optional<int64_t> first;  // rank whose word is the one to compare with
  for (int64_t rank = 0; rank < peers_.size(); ++rank) {
    if (!words[rank]) continue;
    if (!first) first = rank;
    const char kind = kind_of(*words[rank]);
    const std::string rest = words[rank]->substr(words[rank]->empty() ? 0 : 1);
    if (kind == kRefuses || kind == kFails) {
      return Verdict{"rank " + std::to_string(rank) + ": " + rest};
    }
    if (kind == kLeft) return Verdict{rest};
    if (kind != kAsks) {
      return Verdict{"the group's store must keep what ranks say, got \"" + *words[rank] +
                         "\" for rank " + std::to_string(rank) +
                         "; the group cannot be used any more",
                     /*ends_group=*/true};
    }
  }
  for (int64_t rank = 0; rank < peers_.size(); ++rank) {
    if (!words[rank] || *words[rank] == *words[*first]) continue;
    const std::string one = words[*first]->substr(1), other = words[rank]->substr(1);
    const Difference difference = first_difference(one, other);
    const std::string got = ", got " + difference.mine + " on rank " + std::to_string(*first) +
                            " and " + difference.theirs + " on rank " + std::to_string(rank);
    // What a rank refused and others, who knew it, did not wait for: from there on blocks of one
    // call would be taken for those of another.
    if (first_line(one) != first_line(other)) {
      return Verdict{"ranks must have made the same calls" + got +
                         ", one of which was refused; the group cannot be used any more",
                     /*ends_group=*/true};
    }
    return Verdict{"ranks must agree on " + difference.name + got};
  }
  return {};
}

std::string Agreement::word(const Signature& signature, int64_t calls_before) {
  return kAsks + ("calls before=" + std::to_string(calls_before) + "\n") + signature.text();
}

bool Agreement::differs(const Words& words, const std::string& mine) const {
  return std::any_of(words.begin(), words.end(), [&](const std::optional<std::string>& theirs) {
    return theirs.has_value() && *theirs != mine;
  });
}

// Fills in what has been published since.
void Agreement::look(int64_t call, Words& words) {
  for (int64_t rank = 0; rank < peers_.size(); ++rank) {
    if (!words[rank]) words[rank] = peers_.get(key(call, rank), milliseconds(0));
  }
}

void Agreement::refuse(int64_t call, const std::string& message) {
  meet_ = true;
  publish(call, kRefuses + message);
}

void Agreement::fail(int64_t call, const std::string& reason) {
  meet_ = true;
  publish(call, kFails + reason);
}

void Agreement::leave(int64_t call, const std::string& sentence) {
  meet_ = true;
  publish(call, kLeft + sentence);
}

void Agreement::show(int64_t call) {
  // The one before, too: a peer may be in it still, and wait for what this rank did not send.
  for (const int64_t shown : {call - 1, call}) {
    const Recent* asked = recent(shown);
    const bool is_published = std::find(published_.begin(), published_.end(),
                                        key(shown, peers_.rank())) != published_.end();
    if (asked != nullptr && !is_published) {
      publish(shown, word(*asked->signature, asked->calls_before));
    }
  }
}

std::optional<std::string> Agreement::objection(int64_t call, const std::vector<int64_t>& peers) {
  const Recent* asked = recent(call);
  const std::string mine = asked != nullptr ? word(*asked->signature, asked->calls_before) : "";
  Words words(peers_.size());
  for (const int64_t rank : peers) {
    auto theirs = peers_.get(key(call, rank), milliseconds(0));
    if (!theirs || *theirs == mine || kind_of(*theirs) == kFails) continue;
    if (kind_of(*theirs) == kAsks && mine.empty()) continue;
    words[rank] = std::move(theirs);
  }
  if (std::all_of(words.begin(), words.end(), [](const auto& word) { return !word; })) return {};
  if (!mine.empty()) {
    words[peers_.rank()] = mine;
    const auto deadline = Clock::now() + kSettle;
    const auto is_missing = [](const auto& word) { return !word; };
    for (; Clock::now() < deadline; std::this_thread::sleep_for(milliseconds(10))) {
      look(call, words);
      if (std::none_of(words.begin(), words.end(), is_missing)) break;
    }
  }
  const auto verdict = judge(words);
  return verdict ? std::optional<std::string>(verdict->sentence) : std::nullopt;
}

int32_t Agreement::tag(int64_t step) const {
  return static_cast<int32_t>(hash(std::to_string(step), latest_) & 0x7fffffffu);
}

int32_t Agreement::kind() const { return static_cast<int32_t>(latest_kind_ & 0x7fffffffu); }

const Agreement::Recent* Agreement::recent(int64_t call) const {
  if (call < 0) return nullptr;
  const Recent& found = recent_[call % recent_.size()];
  return found.call == call ? &found : nullptr;
}

std::optional<std::string> Agreement::operation(int64_t call) const {
  const Recent* asked = recent(call);
  return asked != nullptr ? std::optional<std::string>(asked->signature->operation())
                          : std::nullopt;
}

std::optional<Agreement::Absence> Agreement::absence(int64_t call, int64_t rank) {
  const auto word = peers_.get(key(call, rank), milliseconds(0));
  if (!word || (kind_of(*word) != kRefuses && kind_of(*word) != kFails)) return {};
  return Absence{kind_of(*word) == kRefuses, word->substr(1)};
}

void Agreement::publish(int64_t call, const std::string& text) {
  const std::string published = key(call, peers_.rank());
  peers_.put(published, text);
  if (std::find(published_.begin(), published_.end(), published) != published_.end()) return;
  published_.push_back(published);
  if (published_.size() <= kMostPublished) return;
  peers_.remove(published_.front());
  published_.pop_front();
}

}  // namespace ringattn
