// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "core/export.h"

namespace ringattn {

/// A name as a literal, for signatures. Each of the callers' names, which are few, is kept for
/// good.
RINGATTN_API const char* literal(std::string_view name);

/// The properties of a call that all ranks must agree on: names and values, in the order in which a
/// difference is searched.
///
/// Made in every call, and nearly always equal to that of an earlier call, so values are kept as
/// bytes: text is made of them only where ranks compare signatures.
class RINGATTN_API Signature {
 public:
  /// Names are literals: the key holds where they lie.
  explicit Signature(const char* operation);

  Signature& add(const char* name, std::string_view value);
  Signature& add(const char* name, c10::ArrayRef<int64_t> values);
  Signature& add(const char* name, int64_t value);
  Signature& add(const char* name, double value);
  Signature& add(const char* name, bool value);
  Signature& add(const char* name, const char* value) { return add(name, std::string_view(value)); }
  /// What is added from here on is new in many calls: ranks compare it in every call, by the tag
  /// that travels with it, where the call has one (CallAgreement). The rest is the call's kind.
  Signature& in_every_call() {
    kind_bytes_ = bytes_.size();
    return *this;
  }
  /// Lines that are made already, each "name=value" and a newline.
  Signature& add_lines(std::string_view lines);

  const char* operation() const { return operation_; }
  /// Equal in this process if and only if all names and values are equal.
  const std::string& key() const { return bytes_; }
  /// The key without what is compared in every call.
  std::string kind() const { return bytes_.substr(0, kind_bytes_); }
  /// One "name=value" a line: comparable between processes, and a difference can be named.
  std::string text() const;

 private:
  Signature& append(char kind, const char* name, const void* data, size_t bytes);

  const char* operation_;
  std::string bytes_;  // of each value: kind, address of the name, number of bytes, bytes
  size_t kind_bytes_ = std::string::npos;
};

}  // namespace ringattn
