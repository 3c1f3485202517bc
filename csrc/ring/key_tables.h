// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/params.h"
#include "core/export.h"
#include "partition/schedule.h"

namespace ringattn {

/// Whether the current stream of `device` is captured in a CUDA graph.
RINGATTN_API bool is_captured(c10::Device device);

/// For each visit of a schedule that sees intervals, the table of them: key_ranges() of this rank's
/// rows and of the block's rows that travel. All layers of a model that repeat a call share them.
/// Not thread-safe: one call at a time.
class RINGATTN_API KeyTables {
 public:
  KeyTables(const Partition& queries, const Partition& keys, int64_t rank, const Mask& mask,
            const std::vector<Visit>& visits);

  /// [W]: int32 [S_r, 2] on `device`, undefined for visits of other kinds. Made in the first call
  /// for a device: there is nothing to make, and nothing is enqueued, in the others. On CUDA work
  /// of the current stream may read them.
  const std::vector<at::Tensor>& on(c10::Device device);
  /// After on(): what the table of a visit was made from. Valid as long as this object.
  HostTable host_table(int64_t step) const {
    const at::Tensor& table = host_tables_[step];
    return {table.defined() ? table.const_data_ptr<int32_t>() : nullptr, first_number_ + step};
  }
  /// The same of a backward: int32 [keys, 2], the rows that see each key. Under capture they are
  /// made each time, as part of the graph.
  std::vector<at::Tensor> transposed_on(c10::Device device);
  /// [W - 1], after on(): of visits 1 .. W-1 whose keys have gaps the parts that a kernel fetches,
  /// int32 [parts, 4] as RemotePart has them; undefined for others, and on CPU.
  const std::vector<at::Tensor>& parts() const { return parts_; }
  /// Whether there are any.
  bool any() const { return any_; }
  /// Whether some are of packed documents.
  bool has_documents() const { return any_ && mask_.has_documents(); }
  /// Whether on() would have to make them, which a stream that is captured cannot.
  bool must_be_made(c10::Device device) const { return any_ && device_ != device; }

 private:
  void make(c10::Device device);
  // Of what the current stream holds now.
  void mark_made();

  const BlockRows queries_;
  std::vector<RowSet> rows_;                    // [W], that are seen
  std::vector<std::optional<BlockRows>> keys_;  // [W], of the visits that see intervals
  bool any_ = false;
  const Mask mask_;
  const int64_t seq_len_;
  c10::Device device_ = c10::Device(c10::kMeta);  // of tables_
  std::vector<at::Tensor> tables_, host_tables_;  // [W]
  int64_t first_number_ = 0;                      // of host_tables_
  std::vector<at::Tensor> parts_;                 // [W - 1]
  std::vector<at::Tensor> transposed_;            // [W], empty until they are asked for
  std::shared_ptr<c10::Event> made_;              // null on CPU, and once they are there
};

}  // namespace ringattn
