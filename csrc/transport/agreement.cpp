// SPDX-License-Identifier: Apache-2.0
#include "transport/agreement.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace ringattn {
namespace {

// First letter of what a rank publishes: its signature follows, or why it refuses the call, or why
// it failed in it.
constexpr char kAsks = 'a', kRefuses = 'r', kFails = 'f';

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

}  // namespace

bool Agreement::knows(const Signature& signature) const {
  return agreed_.count(signature.key()) > 0;
}

void Agreement::join(int64_t call, const Signature& signature) {
  auto agreed = agreed_.find(signature.key());
  if (agreed == agreed_.end() || meet_) {
    const uint32_t text_hash = compare(call, signature);
    if (agreed_.size() >= kMostAgreed) agreed_.clear();
    agreed = agreed_.emplace(signature.key(), text_hash).first;
  }
  latest_kind_ = agreed->second;
  latest_ = hash(std::to_string(call), latest_kind_);
  ++joined_;
}

uint32_t Agreement::compare(int64_t call, const Signature& signature) {
  meet_ = true;  // should this fail
  const std::string text = signature.text();
  const std::string joined = "calls before=" + std::to_string(joined_) + "\n";
  publish(call, kAsks + joined + text);

  // All answers are read before any is judged, so that every rank has the same to say.
  const auto deadline = std::chrono::steady_clock::now() + peers_.timeout() * 4 / 5;
  std::vector<std::string> words(peers_.size());
  for (int64_t rank = 0; rank < peers_.size(); ++rank) {
    const auto word = peers_.get_until(key(call, rank), deadline);
    TORCH_CHECK_WITH(DistBackendError, word.has_value(), "rank ", rank,
                     " did not come to step 0 of ", signature.operation(),
                     " within the group's timeout of ", peers_.timeout().count(), " ms");
    words[rank] = *word;
  }
  for (int64_t rank = 0; rank < peers_.size(); ++rank) {
    TORCH_CHECK(kind_of(words[rank]) != kRefuses && kind_of(words[rank]) != kFails,
                "ringattn: rank ", rank, ": ", words[rank].substr(1));
    TORCH_CHECK_WITH(DistBackendError, kind_of(words[rank]) == kAsks,
                     "the group's store must keep what ranks say, got \"", words[rank],
                     "\" for rank ", rank, "; the group cannot be used any more");
  }
  for (int64_t rank = 0; rank < peers_.size(); ++rank) {
    if (words[rank] == words[0]) continue;
    const Difference difference = first_difference(words[0].substr(1), words[rank].substr(1));
    // What a rank refused and others, who knew it, did not wait for: from there on blocks of one
    // call would be taken for those of another.
    TORCH_CHECK_WITH(DistBackendError,
                     words[rank].rfind(words[0].substr(0, words[0].find('\n') + 1), 0) == 0,
                     "ranks must have made the same calls, got ", difference.mine,
                     " on rank 0 and ", difference.theirs, " on rank ", rank,
                     ", one of which was refused; the group cannot be used any more");
    TORCH_CHECK(false, "ringattn: ranks must agree on ", difference.name, ", got ", difference.mine,
                " on rank 0 and ", difference.theirs, " on rank ", rank);
  }
  meet_ = false;

  // Every rank has come here, so every rank has read all that was said before.
  for (const std::string& earlier : published_) {
    if (earlier != key(call, peers_.rank())) peers_.remove(earlier);
  }
  published_ = {key(call, peers_.rank())};
  return hash(text);
}

void Agreement::refuse(int64_t call, const std::string& message) {
  meet_ = true;
  publish(call, kRefuses + message);
}

void Agreement::fail(int64_t call, const std::string& reason) {
  meet_ = true;
  publish(call, kFails + reason);
}

int32_t Agreement::tag(int64_t step) const {
  return static_cast<int32_t>(hash(std::to_string(step), latest_) & 0x7fffffffu);
}

int32_t Agreement::kind() const { return static_cast<int32_t>(latest_kind_ & 0x7fffffffu); }

std::optional<Agreement::Absence> Agreement::absence(int64_t call, int64_t rank) {
  const auto word = peers_.get(key(call, rank), std::chrono::milliseconds(1));
  if (!word || (kind_of(*word) != kRefuses && kind_of(*word) != kFails)) return {};
  return Absence{kind_of(*word) == kRefuses, word->substr(1)};
}

void Agreement::publish(int64_t call, const std::string& text) {
  peers_.put(key(call, peers_.rank()), text);
  published_.push_back(key(call, peers_.rank()));
}

}  // namespace ringattn
