// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace ringattn {

/// Begins the message of an error of the caller, which a Python caller gets as a ValueError without
/// it (_distributed/errors.py).
constexpr std::string_view kRefusalPrefix = "ringattn: ";

inline bool is_refusal(std::string_view message) {
  return message.substr(0, kRefusalPrefix.size()) == kRefusalPrefix;
}

/// A message without the prefix.
inline std::string sentence_of(std::string_view message) {
  return std::string(message.substr(is_refusal(message) ? kRefusalPrefix.size() : 0));
}

}  // namespace ringattn
