// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "transport/transport.h"

namespace ringattn {

/// All ranks in one process, for tests: a "transfer" is a view of the other rank's tensors.
class RINGATTN_API LoopbackTransport : public Transport {
 public:
  /// blocks[r]: keys and values of rank r. `resident`: a stream gives all blocks at once.
  explicit LoopbackTransport(std::vector<Block> blocks, bool resident = false)
      : blocks_(std::move(blocks)), resident_(resident) {}

  std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) override;

 private:
  std::vector<Block> blocks_;
  bool resident_;
};

}  // namespace ringattn
