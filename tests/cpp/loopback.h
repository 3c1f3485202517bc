// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/cat.h>

#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace ringattn::testing {

/// All ranks in one process: a "transfer" is a view of the other rank's tensors.
class LoopbackTransport : public Transport {
 public:
  /// blocks[r]: keys and values of rank r. `resident`: a stream gives all blocks at once.
  explicit LoopbackTransport(std::vector<Block> blocks, bool resident = false)
      : blocks_(std::move(blocks)), resident_(resident) {}

  std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) override {
    return std::make_unique<Stream>(blocks_, exchange.hops, resident_);
  }

 private:
  class Stream : public BlockStream {
   public:
    Stream(const std::vector<Block>& blocks, const std::vector<HopPlan>& hops, bool resident)
        : resident_(resident) {
      for (const HopPlan& hop : hops) {
        const Block& block = blocks.at(hop.source);
        const auto received = [&](const at::Tensor& x) {
          std::vector<at::Tensor> parts;
          for (const RowRange& rows : hop.received.ranges()) {
            parts.push_back(x.narrow(1, rows.begin, rows.size()));
          }
          return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
        };
        all_.blocks.push_back({received(block.k), received(block.v)});
      }
    }

    Block wait(int64_t step) override { return all_.blocks.at(step - 1); }
    const ResidentBlocks* resident_blocks() const override { return resident_ ? &all_ : nullptr; }
    void release(int64_t step) override {}
    void finish(const std::vector<at::Tensor>& results) override {}
    double transfer_ms(int64_t step) override { return 0.0; }

   private:
    ResidentBlocks all_;
    bool resident_;
  };

  std::vector<Block> blocks_;
  bool resident_;
};

}  // namespace ringattn::testing
