// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "transport/group/call_agreement.h"
#include "transport/group/group_backend.h"
#include "transport/group/peer_wait.h"

namespace ringattn {

/// Everything ringattn keeps for one process group: the agreement of its ranks, its transports, and
/// why it failed if it did. It lives and dies with the group: see resolve().
class RINGATTN_API RingGroup : public std::enable_shared_from_this<RingGroup> {
 public:
  /// The group of this name as it is now. What belonged to groups that have been destroyed since is
  /// freed.
  static std::shared_ptr<RingGroup> resolve(const std::string& name);
  /// The same where a call of it has been made, or nothing. For what one rank may ask alone: groups
  /// are told from earlier ones of their name by how many this rank has made.
  static std::shared_ptr<RingGroup> find(const std::string& name);
  /// Frees what belongs to destroyed groups.
  static void collect();

  explicit RingGroup(std::unique_ptr<Peers> peers);

  Peers& peers() { return *peers_; }
  int64_t rank() const { return peers_->rank(); }
  int64_t size() const { return peers_->size(); }
  std::vector<int64_t> others() const;  // the ranks beside this one, ascending

  /// Begins a collective call with tensors on a `device`: checks that the group has not failed, has
  /// `check` look at this rank's arguments (a refusal reaches the other ranks too), and has all
  /// ranks agree on what is asked for. Returns the number of the call.
  template <typename Check>
  int64_t begin_call(c10::DeviceType device, const Check& check) {
    throw_if_failed();
    const int64_t call = next_call_++;
    std::optional<Signature> signature;
    try {
      signature = check();
    } catch (const c10::Error& error) {
      if (peers_->store_is_alive()) {
        agreement_.refuse(call, without_prefix(error.what_without_backtrace()));
      }
      throw;
    }
    join(call, std::move(*signature), /*tagged=*/device == c10::kCPU);
    return call;
  }
  /// The rest of a call that has begun. A rank that fails here alone is out of step with the
  /// others: the group ends, and they are told why.
  template <typename Body>
  auto run(int64_t call, const Body& body) {
    try {
      return body();
    } catch (const CallLeft&) {
      throw;  // as its peers do
    } catch (const std::exception& error) {
      fail_call(call, error);
      throw;
    }
  }
  /// Agreement::tag of the latest call.
  int32_t tag(int64_t step) const { return agreement_.tag(step); }
  /// And Agreement::kind.
  int32_t kind() const { return agreement_.kind(); }
  /// Whether a call like this has been made before.
  bool knows(const Signature& signature) const { return agreement_.knows(signature); }
  /// This rank's part in a call, when its arguments were refused before they came here.
  void refuse_call(const std::string& message);

  /// Collective: what every rank has to say, by rank, through the store. A rank that does not come
  /// ends the group. `operation`: for lines and errors; empty: that of the latest call.
  std::vector<std::string> exchange(const std::string& mine, const std::string& operation = "");

  /// The operator of a recent call.
  std::string operation(int64_t call) const {
    return agreement_.operation(call).value_or("the ring");
  }
  /// Looks at what `peers` have published, and publishes what this rank asks for in `call`. Throws
  /// CallLeft where one has refused or left it or asks for something else; ends the group where one
  /// has ended it, or where the store is gone. `place`: where this rank waits.
  void look_for_news(int64_t call, const std::vector<int64_t>& peers, const std::string& place);
  /// Ends the group, and throws, where the connection to one of `peers` is closed.
  void check_connections(const std::vector<int64_t>& peers, const std::string& place);
  /// Why the group has ended on one of `peers`, or, on a device, why one refused `call`: then the
  /// group must end here, too. Callable from any thread.
  std::optional<std::string> ended_by(int64_t call, const std::vector<int64_t>& peers);
  /// Throws: the connection to `peer` failed for `reason` in `place` of `call`. Ends the group,
  /// unless the peer has left the call.
  void lose(int64_t call, int64_t peer, const std::string& place, const std::string& reason);

  /// All calls of a group come with tensors on one device of a type; those that the group itself is
  /// to carry, on one that it has a backend for.
  void check_device(c10::Device device, const std::string& transport = "auto") const;
  /// `name` as the caller gave it ("auto" included), resolved for `device`. Making one is
  /// collective; where the ranks cannot have it, it throws on all of them and the group works on.
  MessageTransport& transport(const std::string& name, c10::Device device);
  /// The name of the transport that the latest call took; empty before any.
  const std::string& last_transport() const { return last_transport_; }
  /// For small pieces from everyone to everyone.
  CollectiveTransport& collectives(c10::Device device);

  /// Which rank is to blame that a message of `call` at `step` did not get through, as a sentence.
  /// Asks the store who else has failed. `suspects`: whom this rank was exchanging with.
  std::string blame(int64_t call, int64_t step, const std::vector<int64_t>& suspects,
                    const std::string& reason);
  /// The same, in `place`.
  std::string blame(int64_t call, const std::string& place, const std::vector<int64_t>& suspects,
                    const std::string& reason);
  /// Throws, with blame: the group ends because a collective that it does not run itself, one of
  /// c10d's own in `operation`, failed for `reason`.
  void end(const std::string& operation, const std::string& reason);
  /// Runs `body`, whose failure means that one of `suspects` is gone: the group ends, with blame.
  template <typename Body>
  void blaming(int64_t call, int64_t step, const std::vector<int64_t>& suspects, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      fail(blame(call, step, suspects, reason_of(error)));
      throw_if_failed();
    }
  }
  /// From now on every call throws this, and peers that wait for this rank are told. Callable from
  /// any thread.
  void fail(const std::string& message);
  void throw_if_failed();
  /// Waits until everything that this group has in flight is done or has failed; throws if it has.
  void synchronize();
  /// Whether nothing that this group owns is in use on a device.
  bool idle();

 private:
  static std::string reason_of(const std::exception& error);
  void fail_call(int64_t call, const std::exception& error);
  void lose_store(const std::string& place);
  void join(int64_t call, Signature signature, bool tagged);
  std::vector<int64_t> most_suspected(const std::vector<int64_t>& suspects);
  static std::string without_prefix(const std::string& message);

  std::unique_ptr<Peers> peers_;
  Agreement agreement_;
  std::string choose_transport(c10::Device device);
  std::unique_ptr<MessageTransport> make_transport(const std::string& name, c10::Device device);

  std::map<std::string, std::unique_ptr<MessageTransport>> transports_;  // by name and device type
  std::string last_transport_;
  std::string chosen_;  // what "auto" means on CUDA, once it is known
  std::map<c10::DeviceType, c10::Device> devices_;
  int64_t next_call_ = 0;
  int64_t num_exchanges_ = 0;

  std::mutex mutex_;  // guards failure_
  std::string failure_;
  std::atomic<bool> failed_{false};
};

/// Throws unless tensors on `device_type` can have the transport `name`: "auto", "process_group",
/// "nccl" or "symmetric".
RINGATTN_API void check_transport(const std::string& name, c10::DeviceType device_type);

}  // namespace ringattn
