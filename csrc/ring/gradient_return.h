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

  /// Memory for the gradients of the rows that came at `step`: [2, B, rows, H_kv, D].
  at::Tensor visiting(int64_t step) const;
  /// Sends them. Called for every step in order, also where no row came: they are `visiting` then.
  void send(int64_t step, const at::Tensor& visiting);
  /// dk and dv of this rank's rows: `own`, which is used up, and what has come back, added in the
  /// order of the steps, on the current stream, and rounded to `type`. Ends the transfers.
  std::array<at::Tensor, 2> sum(at::ScalarType type);

 private:
  at::Tensor gradients(int64_t rows) const;

  MessageTransport* const transport_;
  const RingCall& call_;
  const at::Tensor own_;
  std::vector<at::Tensor> received_;                  // [W - 1]
  std::vector<std::unique_ptr<Transfer>> transfers_;  // [W - 1]; null: nothing travels
};

}  // namespace ringattn
