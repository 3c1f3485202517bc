// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "transport/transport.h"

namespace ringattn {

/// All ranks in one process, for tests: a "transfer" is a view of the other rank's tensors.
class RINGATTN_API LoopbackTransport : public Transport {
 public:
  /// blocks[r]: keys and values of rank r.
  explicit LoopbackTransport(std::vector<Block> blocks) : blocks_(std::move(blocks)) {}

  std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) override;

 private:
  std::vector<Block> blocks_;
};

}  // namespace ringattn
