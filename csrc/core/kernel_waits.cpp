// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_waits.h"

#include <cstdlib>
#include <string>

namespace ringattn {

bool kernels_may_wait() {
  static const bool may = [] {
    const char* text = std::getenv("RINGATTN_KERNEL_WAITS");
    return text == nullptr || std::string(text) != "0";
  }();
  return may;
}

}  // namespace ringattn
