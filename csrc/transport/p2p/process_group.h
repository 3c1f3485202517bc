// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "transport/p2p_transport.h"

namespace ringattn {

struct Rendezvous;

/// Messages that nothing waits for any more. Gloo may still read and write their memory, so they
/// are kept until the group is gone. Note: gloo's connection is stuck once it finds a message
/// without memory for it. Thread-safe.
class Unfinished {
 public:
  void keep(c10::intrusive_ptr<c10d::Work> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
  }

 private:
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;  // each holds its tensor
};

/// Messages through `process_group`: gloo on CPU, NCCL on CUDA.
std::unique_ptr<MessageTransport> make_process_group_transport(
    const Rendezvous& rendezvous, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
    c10::Device device);

}  // namespace ringattn
