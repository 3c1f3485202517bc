// SPDX-License-Identifier: Apache-2.0
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/definitions.h"
#include "core/environment.h"
#include "core/log.h"
#include "ring/step_recorder.h"
#include "testing/fault_injection.h"
#include "testing/throttle.h"
#include "transport/group/group_context.h"
#include "transport/group/peer_wait.h"
#include "transport/registry.h"

namespace py = pybind11;

namespace ringattn {
namespace {

// A wait of Python's for all other ranks of a group.
struct GroupWait {
  GroupWait(const std::string& group_name, const std::string& operation)
      : group(GroupContext::resolve(group_name)),
        wait(group->rendezvous(), kOutsideCalls, /*step=*/0, group->rendezvous().others(),
             operation) {}

  std::shared_ptr<GroupContext> group;
  PeerWait wait;
};

// The transport of this rank's captured calls, on the device that they run on.
template <typename Use>
void with_cuda_transport(GroupContext& group, int64_t index, const Use& use) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  const c10::DeviceGuard guard(device);
  use(group.transport("auto", device));
}

// logger(is_warning, line), called with the interpreter's lock from a thread of its own.
py::object& logger() {
  static auto* const kept = new py::object;  // never destroyed: the interpreter ends first
  return *kept;
}

void log_to_python(LogLevel level, const std::string& line) {
  const py::gil_scoped_acquire gil;
  try {
    logger()(level == LogLevel::kWarning, line);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a line of ringattn's log");
  }
}

// None: lines go to stderr. To be set to that before the interpreter ends.
void set_logger(py::object given) {
  {
    const py::gil_scoped_release no_gil;
    set_log_sink(nullptr);
  }
  logger() = std::move(given);
  if (!logger().is_none()) set_log_sink(&log_to_python);
}

}  // namespace

void def_runtime(py::module_& m) {
  py::class_<StepTiming>(m, "StepTiming")
      .def_readonly("call", &StepTiming::call)
      .def_readonly("source", &StepTiming::source)
      .def_property_readonly("kind",
                             [](const StepTiming& step) { return step.own ? "own" : "remote"; })
      .def_readonly("attention_ms", &StepTiming::attention_ms)
      .def_readonly("transfer_ms", &StepTiming::transfer_ms)
      .def_readonly("wait_ms", &StepTiming::wait_ms)
      .def_readonly("flops", &StepTiming::flops)
      .def_readonly("backward", &StepTiming::backward);
  m.def(
      "start_recording", [](bool by_block) { Recorder::get().start(by_block); },
      py::arg("by_block"));
  m.def(
      "stop_recording", [] { return Recorder::get().stop(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("set_slowdown", &set_slowdown, py::arg("factor"));
  m.def("set_sm_cap", &set_sm_cap, py::arg("num_sms"));

  m.def(
      "refuse_call",
      [](const std::string& group_name, const std::string& message) {
        const auto group = GroupContext::resolve(group_name);
        // Where a thread is in a call, its number is not this one's to refuse.
        const CallEntry entry(group.get(), "a refused call");
        if (group->size() > 1) group->refuse_call(message);
      },
      py::arg("group_name"), py::arg("message"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "check_group",
      [](const std::string& group_name) {
        GroupContext::resolve(group_name)->failures().throw_if_failed();
      },
      py::arg("group_name"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "end_group",
      [](const std::string& group_name, const std::string& operation, const std::string& reason) {
        const auto group = GroupContext::resolve(group_name);
        group->failures().end(group->latest_call(), operation, reason);
      },
      py::arg("group_name"), py::arg("operation"), py::arg("reason"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "fail_group",
      [](const std::string& group_name, const std::string& reason) {
        const auto group = GroupContext::resolve(group_name);
        group->failures().fail_call(group->latest_call(), std::runtime_error(reason));
      },
      py::arg("group_name"), py::arg("reason"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "begin_replay",
      [](const std::string& group_name, int64_t device) {
        const auto group = GroupContext::resolve(group_name);
        group->failures().throw_if_failed();
        group->enter("a replay");  // until it ends
        auto leave = c10::make_scope_exit([&] { group->leave(); });
        with_cuda_transport(*group, device, [](auto& transport) { transport.begin_replay(); });
        leave.release();
      },
      py::arg("group_name"), py::arg("device"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "end_replay",
      [](const std::string& group_name, int64_t device) {
        const auto group = GroupContext::resolve(group_name);
        const auto leave = c10::make_scope_exit([&] { group->leave(); });
        with_cuda_transport(*group, device, [](auto& transport) { transport.end_replay(); });
      },
      py::arg("group_name"), py::arg("device"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "exchange",
      [](const std::string& group_name, const std::string& mine, const std::string& operation) {
        std::vector<std::string> said;
        {
          const py::gil_scoped_release no_gil;
          const auto group = GroupContext::resolve(group_name);
          const CallEntry entry(group.get(), "an exchange");
          said = group->exchange_in_call(mine, literal(operation));
        }
        return std::vector<py::bytes>(said.begin(), said.end());
      },
      py::arg("group_name"), py::arg("mine"), py::arg("operation"));
  py::class_<GroupWait>(m, "GroupWait")
      .def(py::init<const std::string&, const std::string&>(), py::arg("group_name"),
           py::arg("operation"))
      .def(
          "poll", [](GroupWait& wait) { wait.wait.poll(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "interrupt", [](GroupWait& wait) { wait.wait.interrupt(); },
          py::call_guard<py::gil_scoped_release>())
      .def("expired", [](const GroupWait& wait) { return wait.wait.expired(); });
  m.def(
      "last_transport",
      [](const std::string& group_name) -> std::optional<std::string> {
        const auto group = GroupContext::find(group_name);
        if (!group || group->last_transport().empty()) return {};
        return group->last_transport();
      },
      py::arg("group_name"));
  m.def(
      "can_record",
      [](const std::string& group_name) {
        const auto group = GroupContext::find(group_name);
        return group && group->can_record();
      },
      py::arg("group_name"));
  m.def("set_logger", &set_logger, py::arg("logger"));
  m.def(
      "synchronize",
      [](const std::string& group_name) {
        if (const auto group = GroupContext::find(group_name)) {
          const CallEntry entry(group.get(), "synchronize");
          group->synchronize();
        }
      },
      py::arg("group_name"), py::call_guard<py::gil_scoped_release>());
  m.def("reread_environment", &reread_environment);
  m.def("inject_transfer_delays", &inject_transfer_delays, py::arg("seed"));
  m.def("transports", &transport_names);
}

}  // namespace ringattn
