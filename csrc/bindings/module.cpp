// SPDX-License-Identifier: Apache-2.0
// ringattn._C: plain values in, plain values out. Tensors go through torch.ops.ringattn.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <torch/version.h>
#include <unistd.h>

#include "attention/block_attention.h"
#include "core/environment.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "partition/schedule.h"
#include "planner/planner.h"
#include "ring/step_recorder.h"
#include "testing/fault_injection.h"
#include "testing/throttle.h"
#include "transport/group/group_context.h"
#include "transport/group/peer_wait.h"
#include "transport/registry.h"

#ifdef RINGATTN_WITH_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif

namespace py = pybind11;

namespace ringattn {
namespace {

using Lengths = std::vector<int64_t>;

Partition partition(const std::string& layout, const Lengths& lengths, const Lengths& order) {
  return Partition(parse_layout(layout), lengths, order);
}

void check_rank(const Partition& partition, int64_t rank) {
  if (rank < 0 || rank >= partition.world_size()) {
    throw std::invalid_argument("rank must lie in [0, " + std::to_string(partition.world_size()) +
                                "), got " + std::to_string(rank));
  }
}

std::vector<std::pair<int64_t, int64_t>> segments(const std::string& layout, const Lengths& lengths,
                                                  const Lengths& order, int64_t rank) {
  const Partition owned = partition(layout, lengths, order);
  check_rank(owned, rank);
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (const Segment& piece : owned.segments(rank)) pieces.emplace_back(piece.begin, piece.end);
  return pieces;
}

std::vector<Visit> visits(const std::string& layout, const Lengths& lengths, const Lengths& order,
                          int64_t rank, bool causal) {
  const Partition owned = partition(layout, lengths, order);
  check_rank(owned, rank);
  return schedule(owned, rank, {causal});
}

Plan planned(int64_t seq_len, const std::vector<RankProfile>& profiles, const ModelCost& cost,
             const std::string& layout, bool causal, bool training, std::optional<int64_t> depth) {
  return plan(seq_len, profiles, cost, parse_layout(layout), {{causal}, training}, depth);
}

std::vector<double> predicted(const std::string& layout, const Lengths& lengths,
                              const Lengths& order, const std::vector<RankProfile>& profiles,
                              const ModelCost& cost, bool causal, bool training,
                              std::optional<int64_t> depth) {
  return predict(partition(layout, lengths, order), profiles, cost, {{causal}, training}, depth);
}

std::vector<AttentionTile> tiles_of(const std::string& device, const std::string& dtype,
                                    int64_t head_dim) {
  if (c10::Device(device).is_cpu()) return {};  // of any dtype
  for (const auto& [name, type] :
       {std::pair{"bfloat16", at::kBFloat16}, {"float16", at::kHalf}, {"float32", at::kFloat}}) {
    if (dtype == name) return attention_tiles(c10::Device(device), type, head_dim);
  }
  throw std::invalid_argument("dtype must be bfloat16, float16 or float32, got " + dtype);
}

// A wait of Python's for all other ranks of a group.
struct GroupWait {
  GroupWait(const std::string& group_name, const std::string& operation)
      : group(GroupContext::resolve(group_name)),
        wait(group->rendezvous(), kOutsideCalls, /*step=*/0, group->rendezvous().others(),
             operation) {}

  std::shared_ptr<GroupContext> group;
  PeerWait wait;
};

// What Ctrl-C raises leaves a wait as the Python exception that it is. Python handles signals on
// the process's main thread alone.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
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

py::dict build_info() {
  py::dict info;
  info["torch_version"] = TORCH_VERSION;
  py::list families;
#ifdef RINGATTN_WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["nccl_version"] = std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) + "." +
                         std::to_string(NCCL_PATCH);
  families.append("sm80");
  families.append("sm90");
#else
  info["cuda"] = false;
  info["cuda_version"] = py::none();
  info["nccl_version"] = py::none();
#endif
  info["kernel_families"] = families;
  return info;
}

}  // namespace
}  // namespace ringattn

PYBIND11_MODULE(_C, m) {
  using namespace ringattn;  // NOLINT: this is the whole program
  set_interrupt_check(&check_signals);
  m.doc() =
      "Partition arithmetic, planner, timings and group state of libringattn, as plain values.";

  py::class_<Band>(m, "Band")
      .def(py::init(&Band::whole), py::arg("num_queries"), py::arg("num_keys"), py::arg("diagonal"))
      .def_readonly("query_begin", &Band::query_begin)
      .def_readonly("query_end", &Band::query_end)
      .def_readonly("key_begin", &Band::key_begin)
      .def_readonly("key_end", &Band::key_end)
      .def_readonly("lower", &Band::lower)
      .def_readonly("upper", &Band::upper)
      .def_property_readonly("num_pairs", &Band::num_pairs);
  py::class_<Visit>(m, "Visit")
      .def_readonly("source", &Visit::source)
      .def_readonly("bands", &Visit::bands)
      .def_property_readonly("num_pairs", &Visit::num_pairs);
  m.def("segments", &segments, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("rank"));
  m.def("schedule", &visits, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("rank"), py::arg("causal"));

  py::class_<AttentionTile>(m, "AttentionTile")
      .def(py::init([](int rows, int keys, int rows_per_warpgroup, int relative_cost,
                       int overhead_keys) {
             return AttentionTile{rows, keys, rows_per_warpgroup, relative_cost, overhead_keys};
           }),
           py::kw_only(), py::arg("rows"), py::arg("keys"), py::arg("rows_per_warpgroup"),
           py::arg("relative_cost"), py::arg("overhead_keys"))
      .def_readonly("rows", &AttentionTile::rows)
      .def_readonly("keys", &AttentionTile::keys)
      .def_readonly("rows_per_warpgroup", &AttentionTile::rows_per_warpgroup)
      .def_readonly("relative_cost", &AttentionTile::relative_cost)
      .def_readonly("overhead_keys", &AttentionTile::overhead_keys);
  m.def("attention_tiles", &tiles_of, py::arg("device"), py::arg("dtype"), py::arg("head_dim"));

  py::class_<RankProfile>(m, "RankProfile")
      .def(py::init([](double attention_tflops, double linear_tflops,
                       std::optional<int64_t> max_tokens, double overhead_ms,
                       std::optional<double> memory_gbps, std::optional<double> link_gbps,
                       std::optional<double> link_latency_us,
                       const std::vector<AttentionTile>& tiles) {
             return RankProfile{attention_tflops, linear_tflops, max_tokens,      overhead_ms,
                                memory_gbps,      link_gbps,     link_latency_us, tiles};
           }),
           py::kw_only(), py::arg("attention_tflops"), py::arg("linear_tflops"),
           py::arg("max_tokens"), py::arg("overhead_ms"), py::arg("memory_gbps"),
           py::arg("link_gbps"), py::arg("link_latency_us"), py::arg("tiles"));
  py::class_<ModelCost>(m, "ModelCost")
      .def(py::init([](double attention_flops, double linear_flops, int64_t kv_bytes) {
             return ModelCost{attention_flops, linear_flops, kv_bytes};
           }),
           py::kw_only(), py::arg("attention_flops"), py::arg("linear_flops"), py::arg("kv_bytes"));
  py::class_<Plan>(m, "Plan")
      .def_property_readonly("lengths", [](const Plan& plan) { return plan.partition.lengths(); })
      .def_property_readonly("order", [](const Plan& plan) { return plan.partition.order(); })
      .def_readonly("depth", &Plan::depth)
      .def_readonly("min_depth", &Plan::min_depth)
      .def_readonly("rank_ms", &Plan::rank_ms)
      .def_readonly("ideal_ms", &Plan::ideal_ms)
      .def_readonly("memory_bytes", &Plan::memory_bytes);
  m.def("plan", &planned, py::arg("seq_len"), py::arg("profiles"), py::arg("cost"),
        py::arg("layout"), py::arg("causal"), py::arg("training"), py::arg("depth"));
  m.def("predict", &predicted, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("profiles"), py::arg("cost"), py::arg("causal"), py::arg("training"),
        py::arg("depth"));
  m.def("plan_cache", &plan_cache, py::arg("num_tokens"), py::arg("profiles"), py::arg("cost"));

  py::class_<StepTiming>(m, "StepTiming")
      .def_readonly("call", &StepTiming::call)
      .def_readonly("source", &StepTiming::source)
      .def_property_readonly("kind",
                             [](const StepTiming& step) { return step.own ? "own" : "remote"; })
      .def_readonly("attention_ms", &StepTiming::attention_ms)
      .def_readonly("transfer_ms", &StepTiming::transfer_ms)
      .def_readonly("wait_ms", &StepTiming::wait_ms)
      .def_readonly("flops", &StepTiming::flops);
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
      "exchange",
      [](const std::string& group_name, const std::string& mine, const std::string& operation) {
        std::vector<std::string> said;
        {
          const py::gil_scoped_release no_gil;
          said = GroupContext::resolve(group_name)->exchange(mine, operation);
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
  m.def("set_logger", &set_logger, py::arg("logger"));
  m.def(
      "synchronize",
      [](const std::string& group_name) {
        if (const auto group = GroupContext::find(group_name)) group->synchronize();
      },
      py::arg("group_name"), py::call_guard<py::gil_scoped_release>());
  m.def("reread_environment", &reread_environment);
  m.def("inject_transfer_delays", &inject_transfer_delays, py::arg("seed"));
  m.def("transports", &transport_names);
  m.def("build_info", &build_info);
}
