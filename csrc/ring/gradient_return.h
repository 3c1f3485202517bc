// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "ring/ring_plan.h"
#include "transport/p2p_transport.h"

namespace ringattn {

/// The way back of the gradients of keys and values: at each step those of the visiting block go to
/// its owner, and those of this rank's rows come from the rank that the step's hop sent them to.
class GradientReturn {
 public:
  /// own [2, B, S_r, H_kv, D], state dtype: memory for the gradients of this rank's rows by its own
  /// queries. `transport` may be null for a single rank.
  GradientReturn(MessageTransport* transport, const RingCall& call, const at::Tensor& own);

  /// Memory for the gradients of the rows that came at `step`: [2, B, rows, H_kv, D]. It is that of
  /// step - 2, which must have been added.
  at::Tensor visiting(int64_t step) const;
  /// Sends them. Called for every step in order, also where no row came.
  void send(int64_t step);
  /// Adds what has come back at `step` to what came back before, on the current stream. Called for
  /// every step but the last, in order.
  void add(int64_t step);
  /// dk and dv of this rank's rows: `own`, which is used up, and what has come back, the last
  /// step's too, on the current stream, rounded to `type`.
  std::array<at::Tensor, 2> sum(at::ScalarType type);

 private:
  int64_t num_hops() const { return static_cast<int64_t>(call_.plan.hops.size()); }
  std::vector<at::Tensor> buffers(RowSet HopPlan::*rows) const;
  // [2, B, rows, H_kv, D] in the step's buffer.
  at::Tensor gradients(const std::vector<at::Tensor>& buffers, int64_t step, int64_t rows) const;
  // Memory for what comes back at `step`.
  at::Tensor arriving(int64_t step);
  // What has come back at `step`. end() must follow, when it has been added.
  at::Tensor received(int64_t step);
  void end(int64_t step);

  MessageTransport* const transport_;
  const RingCall& call_;
  const at::Tensor own_;
  const int64_t row_elements_;                        // of keys and values together
  const std::vector<at::Tensor> leaving_, arriving_;  // two buffers each: two steps are under way
  at::Tensor returned_;                               // like own_; undefined: nothing added yet
  std::vector<std::unique_ptr<Transfer>> transfers_;  // [W - 1]; null: nothing travels
};

}  // namespace ringattn
