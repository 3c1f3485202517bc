// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

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
  /// own [2, B, S_r, H_kv, D], state dtype: gradients of this rank's rows, which arriving ones are
  /// added to.
  GradientReturn(MessageTransport& transport, const RingCall& call, const at::Tensor& own);

  /// Memory for the gradients of the rows that came at `step`: [2, B, rows, H_kv, D].
  at::Tensor visiting(int64_t step) const;
  /// Sends them. Called for every step in order, also where no row came: they are `visiting` then.
  void send(int64_t step, const at::Tensor& visiting);
  /// Adds what has come back at `step`, on the current stream.
  void add(int64_t step);
  void finish();

 private:
  at::Tensor gradients(int64_t rows) const;

  MessageTransport& transport_;
  const RingCall& call_;
  const at::Tensor own_;
  std::vector<at::Tensor> received_;                  // [W - 1]
  std::vector<std::unique_ptr<Transfer>> transfers_;  // [W - 1]; null: nothing travels
};

}  // namespace ringattn
