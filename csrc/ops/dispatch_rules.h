// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace torch {
class Library;
}

namespace ringattn {

/// Registers what gradients, autocast and vmap do to the operators that `library` has defined.
void register_dispatch_rules(torch::Library& library);

}  // namespace ringattn
