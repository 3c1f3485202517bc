// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include "core/export.h"
#include "transport/group/call_agreement.h"
#include "transport/group/failure_diagnosis.h"
#include "transport/group/group_backend.h"
#include "transport/group/rendezvous.h"
#include "transport/p2p_transport.h"

namespace ringattn {

class PeerWait;

/// Everything that ringattn keeps for one process group: the numbers of its calls, the signatures
/// that its ranks have agreed on, the reason of its failure, and its transports. It is freed after
/// the group: see resolve(). Not thread-safe, except for rendezvous() and failures(): one call at a
/// time, which CallEntry makes sure of.
class RINGATTN_API GroupContext {
 public:
  /// The group of this name as it is now. What belonged to groups that have been destroyed since is
  /// freed.
  static std::shared_ptr<GroupContext> resolve(const std::string& name);
  /// The same where a call of it has been made, or null. For queries that one rank makes by itself:
  /// resolve() may count a new group, and groups of one name are distinguished by this count, which
  /// must be the same on all ranks.
  static std::shared_ptr<GroupContext> find(const std::string& name);
  /// Frees what belongs to destroyed groups.
  static void collect();

  explicit GroupContext(std::shared_ptr<GroupBackend> backend);
  GroupContext(const GroupContext&) = delete;
  GroupContext& operator=(const GroupContext&) = delete;

  /// Whether the group's name still means this group.
  bool is_current() const { return backend_->current(); }
  int64_t rank() const { return rendezvous_.rank; }
  int64_t size() const { return rendezvous_.size; }
  /// All ranks of the group.
  const Rendezvous& rendezvous() const { return rendezvous_; }
  const CallAgreement& agreement() const { return *agreement_; }
  FailureDiagnosis& failures() { return *failures_; }

  /// Begins what must not run beside another call of the group; throws where one is under way, and
  /// changes nothing then. `operation` is a literal.
  void enter(const char* operation);
  void leave() { under_way_ = nullptr; }

  /// Begins a collective call: returns its number once all ranks have agreed on the signature.
  /// `tagged`: its messages carry tags (CallAgreement). `compares_tag`: whether the ranks compare
  /// the tag of an untagged call; not asked where they have agreed on the whole signature.
  int64_t begin_call(
      std::shared_ptr<const Signature> signature, bool tagged,
      c10::function_ref<bool()> compares_tag = [] { return false; });
  /// This rank's part in a call whose arguments it refuses: publishes the refusal to its peers.
  void refuse_call(const std::string& message);
  /// The rest of a call that has begun. A rank that fails here alone is out of step with the
  /// others: the group ends, and the reason is published.
  template <typename Body>
  auto run(int64_t call, const Body& body) {
    try {
      return body();
    } catch (const CallLeft&) {
      throw;  // as its peers do
    } catch (const std::exception& error) {
      failures_->fail_call(call, error);
      throw;
    }
  }
  /// The number of the latest call; negative before any.
  int64_t latest_call() const { return agreement_->next_call() - 1; }

  /// Collective, in the course of a call: the strings of all ranks, by rank, through the store. A
  /// rank that does not take part ends the group.
  std::vector<std::string> exchange(const std::string& mine);
  /// The same as a call of its own, which ends where a peer has refused it or is in another one.
  std::vector<std::string> exchange_in_call(const std::string& mine, const char* operation);

  /// Tensors of one type of device must be on the same device in all calls of a group. Tensors that
  /// the group itself carries must be on a type of device that it has a backend for.
  void check_device(c10::Device device, const std::string& transport = "auto") const;
  /// `name` as the caller gave it ("auto" included), resolved for `device`. Making one is
  /// collective; where the ranks cannot have it, it throws on all of them and the group works on.
  MessageTransport& transport(const std::string& name, c10::Device device);
  /// The name of the transport that the latest call took; empty before any.
  std::string last_transport() const { return latest_ != nullptr ? latest_->first.first : ""; }
  /// Whether that transport's messages can be part of a CUDA graph; false before any call.
  bool can_record() const { return latest_ != nullptr && latest_->second->can_be_captured(); }
  /// A transport with collectives, for small tensors.
  CollectiveTransport& collectives(c10::Device device);
  /// The group's own transport, for exchanges beside the calls that last_transport() is about.
  CollectiveTransport& own_transport(c10::Device device);
  /// Waits until everything that this group has in flight is done or has failed; throws if it has.
  void synchronize();
  /// Whether nothing that this group owns is in use on a device.
  bool idle();

  /// What an operator keeps between the calls of this group: made on first use, freed with it.
  template <typename State>
  State& state() {
    std::shared_ptr<void>& state = states_[typeid(State)];
    if (!state) state = std::make_shared<State>();
    return *static_cast<State*>(state.get());
  }

 private:
  const std::string& choose_transport(c10::Device device);
  std::vector<std::string> exchange(const std::string& mine, const std::string& name,
                                    PeerWait& wait);

  const std::shared_ptr<GroupBackend> backend_;
  const std::shared_ptr<CallAgreement> agreement_;
  const std::shared_ptr<FailureDiagnosis> failures_;
  const Rendezvous rendezvous_;

  std::map<std::pair<std::string, c10::DeviceType>, std::unique_ptr<MessageTransport>> transports_;
  decltype(transports_)::const_pointer latest_ = nullptr;  // of the latest call
  std::map<c10::DeviceType, std::string> chosen_;          // the transport of "auto", once chosen
  std::map<c10::DeviceType, c10::Device> devices_;
  std::map<std::type_index, std::shared_ptr<void>> states_;
  int64_t num_exchanges_ = 0;
  std::vector<std::string> exchanged_;           // keys of this rank that are in the store
  std::atomic<const char*> under_way_{nullptr};  // the operation; null: none
};

/// One call of a group, held from before its first check to its end. A null group and a group of
/// one rank keep nothing that a second thread could disturb.
class RINGATTN_API CallEntry {
 public:
  CallEntry(GroupContext* group, const char* operation)
      : group_(group != nullptr && group->size() > 1 ? group : nullptr) {
    if (group_ != nullptr) group_->enter(operation);
  }
  ~CallEntry() {
    if (group_ != nullptr) group_->leave();
  }
  CallEntry(const CallEntry&) = delete;
  CallEntry& operator=(const CallEntry&) = delete;

 private:
  GroupContext* const group_;
};

}  // namespace ringattn
