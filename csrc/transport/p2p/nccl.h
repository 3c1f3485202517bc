// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "transport/p2p_transport.h"

namespace ringattn {

class RingGroup;

/// A communicator of our own, on a high-priority side stream of `device`; made with the help of the
/// group's store. It is aborted, and its waits released, when a transfer outlasts the group's
/// timeout, and freed with the group.
std::unique_ptr<MessageTransport> make_nccl_transport(RingGroup& group, c10::Device device);

}  // namespace ringattn
