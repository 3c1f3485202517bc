// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/export.h"

// Transports by name, and how the process group of a name is found. Each is registered by the file
// that implements it, while the library is loaded; nothing is registered after the first call.

namespace ringattn {

class GroupBackend;
class MessageTransport;
struct Rendezvous;

struct TransportEntry {
  std::string name;
  /// "auto" takes the one with the highest preference that the ranks can have. Errors list names
  /// from the lowest on.
  int preference = 0;
  /// The type of device whose tensors it moves; none: every type that the group carries. "auto"
  /// takes a transport for one type before one for all. Of those for one type, the one with the
  /// lowest preference is a CollectiveTransport.
  std::optional<c10::DeviceType> device_type = std::nullopt;
  /// Collective; throws on all ranks where they cannot have it. Null: GroupBackend::transport.
  std::unique_ptr<MessageTransport> (*make)(const Rendezvous& rendezvous,
                                            c10::Device device) = nullptr;
  /// Where this build has none: which build that is.
  std::string unavailable = {};
};
/// True, so that a constant can be initialised with it.
RINGATTN_API bool register_transport(TransportEntry entry);

/// The names that this build has, without "auto".
RINGATTN_API std::vector<std::string> transport_names();
/// Throws unless tensors on `device_type` can have the transport `name`: "auto" or a name.
RINGATTN_API void check_transport(const std::string& name, c10::DeviceType device_type);
/// What "auto" may mean for tensors on `device_type`, the preferred name first; not empty. The last
/// is a CollectiveTransport.
std::vector<std::string> automatic_transports(c10::DeviceType device_type);
/// The group's own transport, GroupBackend::transport.
std::string group_transport();
/// `name` must be one of transport_names().
const TransportEntry& find_transport(const std::string& name);

using FindBackend = std::shared_ptr<GroupBackend> (*)(const std::string& group_name);
bool register_backend(FindBackend find);
/// The process group of this name; throws where there is none.
std::shared_ptr<GroupBackend> find_backend(const std::string& group_name);

}  // namespace ringattn
