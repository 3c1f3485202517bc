// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/export.h"
#include "transport/group/call_agreement.h"
#include "transport/group/group_backend.h"
#include "transport/group/rendezvous.h"

namespace ringattn {

/// Detects that a wait has failed, determines which rank is to blame, and ends the group. Ranks are
/// those of the group. Shared with the watched operations of transfers, which may outlive the
/// group.
class RINGATTN_API FailureDiagnosis : public CallMonitor {
 public:
  FailureDiagnosis(std::shared_ptr<GroupBackend> backend, std::shared_ptr<CallAgreement> agreement);

  int32_t message_tag(int64_t step) const override { return agreement_->message_tag(step); }
  int32_t call_tag() const override { return agreement_->call_tag(); }
  std::string operation(int64_t call) const override;

  using CallMonitor::blame;
  void check_peers(int64_t call, const Ranks& peers, const std::string& place) override;
  void check_connections(const Ranks& peers, const std::string& place) override;
  std::optional<std::string> ended_by(int64_t call, const Ranks& peers) override;
  std::optional<std::string> refused_next(const Ranks& peers) override;
  void lose(int64_t call, int64_t peer, const std::string& place,
            const std::string& reason) override;
  std::string blame(int64_t call, const std::string& place, const Ranks& suspects,
                    const std::string& reason) override;
  void fail(const std::string& message) override;
  void throw_if_failed() override;

  /// Ends the group where the process that holds its store is gone, and throws.
  void check_store(const std::string& place);
  /// Runs `use`, which uses the store; where that ends meanwhile, as check_store().
  void use_store(const std::string& place, c10::function_ref<void()> use);
  /// Ends the group: this rank alone failed in `call`, and is out of step with the others.
  void fail_call(int64_t call, const std::exception& error);
  /// Throws, with blame: the group ends because a collective that it does not run itself, one of
  /// c10d's own in `operation` after `call`, failed for `reason`.
  void end(int64_t call, const std::string& operation, const std::string& reason);

 private:
  Ranks most_suspected(const Ranks& suspects);

  const std::shared_ptr<GroupBackend> backend_;
  const std::shared_ptr<CallAgreement> agreement_;
  const Ranks others_;

  std::mutex mutex_;  // guards failure_
  std::string failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace ringattn
