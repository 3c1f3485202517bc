// SPDX-License-Identifier: Apache-2.0
#include "transport/registry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace ringattn {
namespace {

// By preference, the lowest first. Never destroyed: a thread may still make a call while the
// process ends.
std::vector<TransportEntry>& entries() {
  static auto& entries = *new std::vector<TransportEntry>{
#ifndef RINGATTN_WITH_CUDA
      {"nccl", 1, c10::kCUDA, nullptr, "in a build without CUDA"},
      {"symmetric", 2, c10::kCUDA, nullptr, "in a build without CUDA"},
#endif
  };
  return entries;
}

FindBackend& backend_finder() {
  static FindBackend finder = nullptr;
  return finder;
}

const TransportEntry* find_entry(const std::string& name) {
  const auto found = std::find_if(entries().begin(), entries().end(),
                                  [&](const TransportEntry& entry) { return entry.name == name; });
  return found != entries().end() ? &*found : nullptr;
}

// "auto", "a" or "b".
std::string one_of_names(const std::vector<std::string>& names) {
  std::string text = "\"auto\"";
  for (const std::string& name : names) {
    text += (name == names.back() ? " or \"" : ", \"") + name + "\"";
  }
  return text;
}

template <typename Condition>
std::vector<std::string> names_where(const Condition& condition) {
  std::vector<std::string> names;
  for (const TransportEntry& entry : entries()) {
    if (condition(entry)) names.push_back(entry.name);
  }
  return names;
}

}  // namespace

bool register_transport(TransportEntry entry) {
  const auto above = std::find_if(entries().begin(), entries().end(), [&](const auto& other) {
    return other.preference > entry.preference;
  });
  entries().insert(above, std::move(entry));
  return true;
}

std::vector<std::string> transport_names() {
  return names_where([](const TransportEntry& entry) { return entry.unavailable.empty(); });
}

void check_transport(const std::string& name, c10::DeviceType device_type) {
  if (name == "auto") return;
  const TransportEntry* entry = find_entry(name);
  TORCH_CHECK(entry != nullptr, "ringattn: transport must be ",
              one_of_names(names_where([](const auto&) { return true; })), ", got \"", name, "\"");
  TORCH_CHECK(entry->unavailable.empty(), "ringattn: transport must be ",
              one_of_names(transport_names()), " ", entry->unavailable, ", got \"", name, "\"");
  const auto wanted = entry->device_type.value_or(device_type);
  TORCH_CHECK(device_type == wanted, "ringattn: transport \"", name, "\" must be given ",
              c10::DeviceTypeName(wanted), " tensors, got ", device_type, " tensors");
}

std::vector<std::string> automatic_transports(c10::DeviceType device_type) {
  const auto names_for = [](std::optional<c10::DeviceType> wanted) {
    auto names = names_where([&](const TransportEntry& entry) {
      return entry.unavailable.empty() && entry.device_type == wanted;
    });
    std::reverse(names.begin(), names.end());
    return names;
  };
  const auto names = names_for(device_type);
  return names.empty() ? names_for(std::nullopt) : names;
}

std::string group_transport() {
  const auto own = [](const auto& entry) { return !entry.make && entry.unavailable.empty(); };
  const auto names = names_where(own);
  TORCH_INTERNAL_ASSERT(!names.empty(), "no group has a transport of its own");
  return names.front();
}

const TransportEntry& find_transport(const std::string& name) {
  const TransportEntry* entry = find_entry(name);
  TORCH_INTERNAL_ASSERT(entry != nullptr, "no transport is registered as ", name);
  return *entry;
}

bool register_backend(FindBackend find) {
  backend_finder() = find;
  return true;
}

std::shared_ptr<GroupBackend> find_backend(const std::string& group_name) {
  TORCH_INTERNAL_ASSERT(backend_finder() != nullptr, "no backend of process groups is registered");
  return backend_finder()(group_name);
}

}  // namespace ringattn
