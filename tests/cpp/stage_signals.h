// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "transport/symmetric/kernels/stage.h"

namespace ringattn::testing {

constexpr int kPeers = 3;
constexpr int kTag = 77;

inline bool all_are(const at::Tensor& words, uint32_t value) {
  return words.eq(static_cast<int>(value)).all().item<bool>();
}

/// The words of a call on one device, whose own stand for those of other ranks.
struct Words {
  at::Tensor all = at::zeros({7 * kPeers + cuda::kStageCounters + 5},
                             at::TensorOptions(at::kCUDA).dtype(at::kInt));
  at::Tensor signals = all.narrow(0, 0, kPeers);
  at::Tensor taken_back = all.narrow(0, kPeers, kPeers).fill_(1);
  at::Tensor awaited = all.narrow(0, 2 * kPeers, kPeers);
  at::Tensor told = all.narrow(0, 3 * kPeers, kPeers);
  at::Tensor theirs = all.narrow(0, 4 * kPeers, kPeers).fill_(kTag);
  at::Tensor for_streams = all.narrow(0, 5 * kPeers, kPeers);
  at::Tensor back_for_streams = all.narrow(0, 6 * kPeers, kPeers).fill_(1);
  at::Tensor counters = all.narrow(0, 7 * kPeers, cuda::kStageCounters);
  // failed, calls, both shown, unlike
  at::Tensor others = all.narrow(0, 7 * kPeers + cuda::kStageCounters, 5);

  static uint32_t* word(const at::Tensor& x, int64_t i) {
    return reinterpret_cast<uint32_t*>(x.data_ptr<int>()) + i;
  }
  void give(cuda::StageParams& params) const {
    for (int i = 0; i < kPeers; ++i) {
      params.signals[i] = word(signals, i);
      params.taken_back[i] = word(taken_back, i);
      params.signals_for_streams[i] = word(for_streams, i);
      params.taken_back_for_streams[i] = word(back_for_streams, i);
      params.awaited[i] = word(awaited, i);
      params.tags.told[i] = word(told, i);
      params.tags.theirs[i] = word(theirs, i);
    }
    params.tags.own = kTag;
    params.tags.unlike = word(others, 4);
    params.num_signals = kPeers;
    params.num_awaited = params.kernel_fetches ? kPeers : 0;
    params.blocks_done = word(counters, 0);
    params.failed = word(others, 0);
    params.calls = word(others, 1);
    params.calls_shown = word(others, 2);
    params.phase_shown = word(others, 3);
    params.phase = 9;
  }
};

}  // namespace ringattn::testing
