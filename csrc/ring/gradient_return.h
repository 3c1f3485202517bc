// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/sum_rows.h"
#include "core/export.h"
#include "ring/ring_plan.h"
#include "transport/p2p_transport.h"

namespace ringattn {

/// dk and dv of a block, [B, rows, H_kv, D].
using KeyGradients = std::array<at::Tensor, 2>;

/// The way back of the gradients of keys and values: at each step those of the visiting block go to
/// its owner, and those of this rank's rows come from the rank that the step's hop sent them to. No
/// rank waits for them before the end, unless there are more steps than a round has.
class RINGATTN_API GradientReturn {
 public:
  /// By all ranks, two or more, before the transport opens the call. own [2, B, S_r, H_kv, D],
  /// state dtype: memory for the gradients of this rank's rows by its own queries.
  GradientReturn(MessageTransport* transport, const RingCall& call, const at::Tensor& own);

  /// Memory for the gradients of the rows that came at `step`. Called for every step in order, also
  /// where no row came.
  KeyGradients visiting(int64_t step);
  /// Sends them, before those of the next step are asked for.
  void send(int64_t step) { round_->start(slot(step)); }
  /// dk and dv of this rank's rows: `own`, which is used up, and what has come back, on the current
  /// stream, rounded to `type`.
  KeyGradients sum(at::ScalarType type);

 private:
  int64_t num_hops() const { return static_cast<int64_t>(call_.plan.hops.size()); }
  static int64_t slot(int64_t step) { return (step - 1) % kStepsOfRound; }
  std::vector<int64_t> buffer_elements(RowSet HopPlan::*rows) const;
  // [2, B, rows, H_kv, D] in the step's buffer.
  at::Tensor gradients(const std::vector<at::Tensor>& buffers, int64_t step,
                       const RowSet& rows) const;
  // What comes back at `step`.
  at::Tensor arriving(int64_t step) const {
    return gradients(arriving_, step, call_.plan.hops[step - 1].sent);
  }
  Message message(int64_t step) const;
  void next_round(int64_t first_step);
  // What has come back at the steps [first, end) of the round, for the current stream.
  std::vector<RowsToAdd> returned(int64_t first, int64_t end) const;

  MessageTransport* const transport_;
  const RingCall& call_;
  const at::Tensor own_;
  const int64_t row_elements_;                  // of keys and values together
  const int64_t largest_;                       // message of any rank, bytes
  std::vector<at::Tensor> leaving_, arriving_;  // a buffer for each step of a round
  std::unique_ptr<MessageRound> round_;
  at::Tensor earlier_;  // like own_: what came back in rounds before; undefined: nothing
};

}  // namespace ringattn
