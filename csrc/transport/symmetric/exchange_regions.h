// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/export.h"
#include "peer_sync/partial_exchange.h"

namespace ringattn {

/// The exchange regions of all ranks (peer_sync/partial_exchange.h), as one of them sees them. It
/// does not own their memory.
class RINGATTN_API ExchangeRegions {
 public:
  /// Copies bytes from or to a region, and waits until it has.
  using Copy = std::function<void(void* to, const void* from, size_t bytes)>;

  /// Of one region: a multiple of 256.
  static size_t bytes(int64_t num_ranks);

  /// regions [W]: where this process sees them, by rank.
  ExchangeRegions(std::vector<void*> regions, int64_t rank);

  /// Initialises this rank's region, before any rank exchanges.
  void initialise(const Copy& copy) const;
  /// The addresses of slots, signals and words. The rest is for the caller to set.
  PartialExchange addresses() const;
  /// As WatchedSignals, for a wait that a kernel shows: exchange_shown() of each rank's partial
  /// that has arrived, 0 of others, [W].
  std::vector<uint32_t> progress(const Copy& copy) const;

 private:
  std::vector<void*> regions_;
  int64_t rank_;
};

}  // namespace ringattn
