// SPDX-License-Identifier: Apache-2.0
#include "transport/group/call_signature.h"

#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

#include "core/process_singleton.h"

namespace ringattn {
namespace {

constexpr char kText = 't', kIntegers = 'l', kInteger = 'i', kReal = 'r', kBoolean = 'b',
               kLines = 'n';

struct Names {
  std::mutex mutex;
  std::set<std::string, std::less<>> kept;
};

/// Reads back what append() has written.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  bool more() const { return at_ != end_; }
  template <typename Value>
  Value next() {
    Value value;
    std::memcpy(&value, at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string_view next_text(size_t bytes) {
    const std::string_view text(at_, bytes);
    at_ += bytes;
    return text;
  }

 private:
  const char* at_;
  const char* end_;
};

}  // namespace

const char* literal(std::string_view name) {
  Names& names = process_singleton<Names>();
  const std::lock_guard<std::mutex> lock(names.mutex);
  return names.kept.emplace(name).first->c_str();
}

Signature::Signature(const char* operation) : operation_(operation) {
  constexpr size_t kUsualBytes = 512;
  bytes_.reserve(kUsualBytes);
  add("operator", operation);
}

Signature& Signature::append(char kind, const char* name, const void* data, size_t bytes) {
  bytes_ += kind;
  bytes_.append(reinterpret_cast<const char*>(&name), sizeof(name));
  bytes_.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  bytes_.append(static_cast<const char*>(data), bytes);
  return *this;
}

Signature& Signature::add(const char* name, std::string_view value) {
  return append(kText, name, value.data(), value.size());
}
Signature& Signature::add(const char* name, c10::ArrayRef<int64_t> values) {
  return append(kIntegers, name, values.data(), values.size() * sizeof(int64_t));
}
Signature& Signature::add(const char* name, int64_t value) {
  return append(kInteger, name, &value, sizeof(value));
}
Signature& Signature::add(const char* name, double value) {
  return append(kReal, name, &value, sizeof(value));
}
Signature& Signature::add(const char* name, bool value) {
  return append(kBoolean, name, &value, sizeof(value));
}
Signature& Signature::add_lines(std::string_view lines) {
  return append(kLines, nullptr, lines.data(), lines.size());
}

std::string Signature::text() const {
  std::ostringstream text;
  text.precision(17);
  Reader reader(bytes_);
  while (reader.more()) {
    const char kind = reader.next<char>();
    const auto* name = reader.next<const char*>();
    const auto bytes = reader.next<size_t>();
    if (kind == kLines) {
      text << reader.next_text(bytes);
      continue;
    }
    text << name << "=";
    if (kind == kText) {
      text << reader.next_text(bytes);
    } else if (kind == kInteger) {
      text << reader.next<int64_t>();
    } else if (kind == kReal) {
      text << reader.next<double>();
    } else if (kind == kBoolean) {
      text << (reader.next<bool>() ? "True" : "False");
    } else {
      std::vector<int64_t> values(bytes / sizeof(int64_t));
      for (int64_t& value : values) value = reader.next<int64_t>();
      text << c10::ArrayRef<int64_t>(values);
    }
    text << "\n";
  }
  return text.str();
}

}  // namespace ringattn
