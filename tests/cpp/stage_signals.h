// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "transport/symmetric/kernels/stage.h"

namespace ringattn::testing {

constexpr int kPeers = 3;
constexpr int kTag = 77;

inline bool all_are(const at::Tensor& values, uint32_t value) {
  return values.eq(static_cast<int>(value)).all().item<bool>();
}

/// The signals of a call on one device: its own pad stands for those of its peers.
struct Pad {
  at::Tensor all = at::zeros({7 * kPeers + cuda::kStageCounters + 5},
                             at::TensorOptions(at::kCUDA).dtype(at::kInt));
  at::Tensor staged_by_this_rank = all.narrow(0, 0, kPeers);
  at::Tensor read_by_peer = all.narrow(0, kPeers, kPeers).fill_(1);
  at::Tensor staged_by_peer = all.narrow(0, 2 * kPeers, kPeers);
  at::Tensor tag_by_this_rank = all.narrow(0, 3 * kPeers, kPeers);
  at::Tensor tag_by_peer = all.narrow(0, 4 * kPeers, kPeers).fill_(kTag);
  at::Tensor staged_mirror_by_this_rank = all.narrow(0, 5 * kPeers, kPeers);
  at::Tensor read_mirror_by_peer = all.narrow(0, 6 * kPeers, kPeers).fill_(1);
  at::Tensor counters = all.narrow(0, 7 * kPeers, cuda::kStageCounters);
  // failed, calls, host_calls, host_phase, mismatch
  at::Tensor others = all.narrow(0, 7 * kPeers + cuda::kStageCounters, 5);

  static uint32_t* at(const at::Tensor& x, int64_t i) {
    return reinterpret_cast<uint32_t*>(x.data_ptr<int>()) + i;
  }
  void add_to(cuda::StageParams& params) const {
    for (int i = 0; i < kPeers; ++i) {
      params.staged_by_this_rank[i] = at(staged_by_this_rank, i);
      params.read_by_peer[i] = at(read_by_peer, i);
      params.staged_mirror_by_this_rank[i] = at(staged_mirror_by_this_rank, i);
      params.read_mirror_by_peer[i] = at(read_mirror_by_peer, i);
      params.staged_by_peer[i] = at(staged_by_peer, i);
      params.tags.by_this_rank[i] = at(tag_by_this_rank, i);
      params.tags.by_peer[i] = at(tag_by_peer, i);
    }
    params.tags.value = kTag;
    params.tags.mismatch = at(others, 4);
    params.num_peers = kPeers;
    params.num_awaited = params.kernel_fetches ? kPeers : 0;
    params.blocks_done = at(counters, 0);
    params.failed = at(others, 0);
    params.calls = at(others, 1);
    params.host_calls = at(others, 2);
    params.host_phase = at(others, 3);
    params.phase = 9;
  }
};

}  // namespace ringattn::testing
