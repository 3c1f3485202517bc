// SPDX-License-Identifier: Apache-2.0
#include "transport/group/peer_wait.h"

#include <algorithm>
#include <utility>

#include "core/interrupt.h"
#include "core/log.h"

namespace ringattn {

using std::chrono::milliseconds;

WaitReport::WaitReport(milliseconds first) : first_(first), next_(first) {}

bool WaitReport::due(milliseconds waited) {
  if (waited < next_) return false;
  constexpr int kFurther = 6;
  next_ = next_ == first_ ? kFurther * first_ : next_ + kFurther * first_;
  return true;
}

void WaitReport::log(int64_t rank, const std::vector<int64_t>& peers, const std::string& place,
                     milliseconds waited) {
  const int64_t tenths = waited.count() / 100;
  const std::string fraction = tenths < 100 ? "." + std::to_string(tenths % 10) : "";
  ringattn::log(LogLevel::kWarning, "rank " + std::to_string(rank) + " has waited " +
                                        std::to_string(tenths / 10) + fraction + " s for " +
                                        one_of(peers) + " in " + place);
}

PeerWait::PeerWait(const Rendezvous& rendezvous, int64_t call, int64_t step,
                   std::vector<int64_t> peers, std::string operation)
    : rendezvous_(rendezvous),
      call_(call),
      step_(step),
      peers_(std::move(peers)),
      operation_(std::move(operation)),
      tests_connections_(call == kOutsideCalls) {}

std::string PeerWait::place() const {
  return "step " + std::to_string(step_) + " of " +
         (operation_.empty() ? rendezvous_.calls->operation(call_) : operation_);
}

void PeerWait::interrupt() {
  rendezvous_.calls->fail("rank " + std::to_string(rendezvous_.rank) + " was interrupted in " +
                          place() + "; the group cannot be used any more");
}

bool PeerWait::expired() const { return Clock::now() - start_ >= rendezvous_.patience(); }

void PeerWait::poll() {
  try {
    check_interrupt();
  } catch (...) {
    interrupt();
    throw;
  }
  rendezvous_.calls->throw_if_failed();
  const auto now = Clock::now();
  const auto waited = std::chrono::duration_cast<milliseconds>(now - start_);
  if (now >= next_look_) {
    rendezvous_.calls->check_peers(call_, peers_, place());
    // A longer wait polls less often: the store serves all ranks.
    next_look_ = now + std::clamp(waited / 20, milliseconds(50), milliseconds(500));
  }
  // A wait for a message ends when its connection closes. A wait through the store has to test the
  // connection, and each test leaves an unmatched receive behind.
  if (tests_connections_ && waited >= next_check_) {
    rendezvous_.calls->check_connections(peers_, place());
    next_check_ = 2 * waited;
  }
  if (report_.due(waited)) WaitReport::log(rendezvous_.rank, peers_, place(), waited);
}

}  // namespace ringattn
