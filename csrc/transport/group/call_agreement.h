// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/export.h"
#include "transport/group/call_signature.h"
#include "transport/group/group_backend.h"

namespace ringattn {

/// Thrown where this rank leaves a call although its own arguments are valid: a peer has refused
/// the call or is in another one. The peers that wait for this rank read why; the group stays
/// usable.
class CallLeft : public c10::Error {
 public:
  using c10::Error::Error;
};

/// Ranks compare the signatures of a call through the group's store before they send anything. A
/// signature that the ranks have agreed on once costs a look-up from then on. Of a call whose tag
/// ranks compare, in messages or in signals, that is enough for its kind (Signature): the rest may
/// be new in every call, and a difference is found as one between known calls is.
///
/// Two mistakes are detected while ranks wait: known calls that differ, and a rank that refuses a
/// known call while its peers are in it. A rank that has waited for a while publishes its signature
/// (publish_request) and reads what the ranks that it waits for have published (objection). A
/// header on each message would cost every call; this costs a call without a long wait nothing, and
/// the same read returns why a peer has left the call and whether its group has ended. A statement
/// passes along the longest chain of ranks that wait for each other in a few reads.
///
/// Messages on CPU carry a tag of the call's number and signature (message_tag), so no rank takes
/// the data of one call for that of another, and calls after a refused or a different one need no
/// comparison. Kernels and NCCL have no such tags. For their calls (`tagged` is false) ranks
/// compare again after a refusal, and publish how many calls they have been in: a rank that refused
/// a call that others made is out of step there, and the group ends.
///
/// A rank that compares a call which the others know waits for them, and their hosts may be many
/// calls on. It publishes which call that is, for those who watch what they have launched
/// (obstacle).
///
/// Calls are numbered; all ranks make the same calls in the same order, refused ones included.
/// Replays of captured calls have no numbers: the host does not see them. Not thread-safe, except
/// for absence(), obstacle() and next_call(): one call at a time.
class RINGATTN_API CallAgreement {
 public:
  /// Signatures that are remembered. Lengths of shards are part of one, and a server sees ever new
  /// lengths. All ranks forget all signatures at the same call.
  static constexpr size_t kMaxAgreed = 4096;
  static constexpr size_t kMaxAgreedBytes = size_t{32} << 20;  // documents are part of a key

  explicit CallAgreement(std::shared_ptr<GroupBackend> backend) : backend_(std::move(backend)) {}

  /// The number of a call that begins.
  int64_t number_call() { return next_call_++; }
  /// The number of the call that begins next.
  int64_t next_call() const { return next_call_; }

  /// Whether the ranks have agreed on this kind of call before.
  bool knows(const Signature& signature) const;
  /// Begins a call that ranks need not compare. False where they must, and nothing has begun.
  /// `compares_tag`: whether they compare the call's tag, asked only where they have agreed on the
  /// signature's kind and not on the rest. A tagged call is not asked.
  bool join_known(int64_t call, const std::shared_ptr<const Signature>& signature, bool tagged,
                  c10::function_ref<bool()> compares_tag);
  /// Returns once all ranks have published this signature. Throws on every rank where one has
  /// published another signature, has refused its arguments, or has published nothing within the
  /// group's timeout. Calls `poll` with a missing rank while it waits for that rank.
  void join(int64_t call, std::shared_ptr<const Signature> signature, bool tagged,
            c10::function_ref<void(int64_t)> poll);
  /// Publishes that this rank's arguments are wrong.
  void refuse(int64_t call, const std::string& message);
  /// Publishes that this rank failed in the middle of the call.
  void fail(int64_t call, const std::string& reason);

  /// Publishes this rank's signatures of `call` and of the call before it, unless it has.
  void publish_request(int64_t call);
  /// Why this rank should leave `call`, by what `peers` have published: one has refused it, has
  /// left it, or has another signature.
  std::optional<std::string> objection(int64_t call, const std::vector<int64_t>& peers);
  /// Publishes that this rank has left the call, and why.
  void leave(int64_t call, const std::string& sentence);

  /// As CallMonitor's.
  int32_t message_tag(int64_t step) const;
  int32_t call_tag() const;
  /// The operator of a recent call; nothing for an older one.
  std::optional<std::string> operation(int64_t call) const;
  /// Why a rank does not take part in a call.
  struct Absence {
    bool refused = false;  // before it took part; false: it failed in the middle
    std::string why;
  };
  /// The refusal or the failure that `rank` has published for `call`.
  std::optional<Absence> absence(int64_t call, int64_t rank);
  /// Why untagged calls up to `call`, which this rank has begun, cannot end: `rank` has refused
  /// `call` or another one that this rank has begun, or compares one that this rank has not.
  std::optional<std::string> obstacle(int64_t call, int64_t rank);

 private:
  // By key of a signature, a hash of its text; by its kind alone, 0.
  using Agreed = std::unordered_map<std::string, uint32_t>;
  using Statements = std::vector<std::optional<std::string>>;  // [W]: what each rank has published
  /// The error that follows from statements that differ.
  struct Verdict {
    std::string sentence;
    bool ends_group = false;
  };

  Agreed::iterator remember(std::string key, uint32_t text_hash);
  void begin(int64_t call, uint32_t text_hash, std::shared_ptr<const Signature> signature,
             bool tagged);
  // Returns a hash of the signature's text once all ranks have published the same signature.
  uint32_t compare(int64_t call, const Signature& signature, int64_t calls_before,
                   c10::function_ref<void(int64_t)> poll);
  std::optional<Verdict> judge(const Statements& statements) const;
  static std::string statement(const Signature& signature, int64_t calls_before);
  bool differs(const Statements& statements, const std::string& mine) const;
  void read_missing(int64_t call, Statements& statements);
  void publish(int64_t call, const std::string& text);
  // The signature of a recent call, unless this rank has published for it.
  void publish_asked(int64_t call);
  // The number under a key of another rank: of a call since this rank last compared one.
  std::optional<int64_t> announced(const std::string& key);
  // Whether this rank is, or was, in untagged call `number`. Of one that is no longer recent, it is
  // taken to have been.
  bool began_untagged(int64_t number);
  struct Recent {
    int64_t call = -1;
    int64_t calls_before = 0;  // untagged ones that this rank had been in; negative: it is tagged
    std::shared_ptr<const Signature> signature;
  };
  const Recent* recent(int64_t call) const;
  struct Published {
    std::string key;
    bool is_request = true;
  };
  std::deque<Published>::iterator find_published(const std::string& name);

  const std::shared_ptr<GroupBackend> backend_;
  std::atomic<int64_t> next_call_{0};
  std::atomic<int64_t> last_compared_{-1}, last_known_{-1};  // calls that were, and were not
  Agreed agreed_;
  size_t agreed_bytes_ = 0;          // of its keys
  bool compare_known_ = false;       // after a refusal, untagged calls compare known ones again
  uint32_t message_hash_ = 0;        // of the latest call's number and text
  uint32_t call_hash_ = 0;           // of its text
  int64_t untagged_calls_ = 0;       // that this rank has been in
  std::mutex begin_mutex_;           // guards recent_ from obstacle(); begin() alone changes it
  std::array<Recent, 64> recent_;    // by number of the call
  std::deque<Published> published_;  // by this rank, and in the store
};

}  // namespace ringattn
