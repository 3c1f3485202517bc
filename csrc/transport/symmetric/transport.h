// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/p2p_transport.h"

namespace ringattn {

class RingGroup;

/// One-sided, between devices of one host: every rank stages its block in memory that all ranks can
/// read, and readers fetch it from there: the attention kernel itself, or copy engines. Collective;
/// throws on all ranks where they do not share memory.
std::unique_ptr<MessageTransport> make_symmetric_transport(RingGroup& group, c10::Device device);

}  // namespace ringattn
