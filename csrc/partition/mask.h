// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn {

/// Which keys of the sequence a query sees.
struct Mask {
  bool causal = true;  // those at its own position and before; otherwise all
};

}  // namespace ringattn
