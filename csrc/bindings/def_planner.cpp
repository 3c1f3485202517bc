// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "bindings/definitions.h"
#include "planner/planner.h"

namespace py = pybind11;

namespace ringattn {
namespace {

using Window = std::pair<int64_t, int64_t>;
using Documents = std::optional<std::vector<int64_t>>;

Plan planned(int64_t seq_len, const std::vector<RankProfile>& profiles, const ModelCost& cost,
             const std::optional<std::string>& layout, bool causal, bool training,
             std::optional<int64_t> depth, const Window& window, const Documents& cu_seqlens) {
  const Mask mask = make_mask(causal, window.first, window.second, cu_seqlens, seq_len);
  const auto in = layout ? std::optional(parse_layout(*layout)) : std::nullopt;
  return plan(seq_len, profiles, cost, in, {mask, training}, depth);
}

std::vector<double> predicted(const std::string& layout, const std::vector<int64_t>& lengths,
                              const std::vector<int64_t>& order,
                              const std::vector<RankProfile>& profiles, const ModelCost& cost,
                              bool causal, bool training, std::optional<int64_t> depth,
                              const Window& window, const Documents& cu_seqlens) {
  const Partition partition(parse_layout(layout), lengths, order);
  const Mask mask = make_mask(causal, window.first, window.second, cu_seqlens, partition.seq_len());
  return predict(partition, profiles, cost, {mask, training}, depth);
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

}  // namespace

void def_planner(py::module_& m) {
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
      .def_property_readonly("layout",
                             [](const Plan& plan) { return layout_name(plan.partition.layout()); })
      .def_property_readonly("lengths", [](const Plan& plan) { return plan.partition.lengths(); })
      .def_property_readonly("order", [](const Plan& plan) { return plan.partition.order(); })
      .def_readonly("depth", &Plan::depth)
      .def_readonly("min_depth", &Plan::min_depth)
      .def_readonly("rank_ms", &Plan::rank_ms)
      .def_readonly("ideal_ms", &Plan::ideal_ms)
      .def_readonly("memory_bytes", &Plan::memory_bytes);
  m.def("plan", &planned, py::arg("seq_len"), py::arg("profiles"), py::arg("cost"),
        py::arg("layout"), py::arg("causal"), py::arg("training"), py::arg("depth"),
        py::arg("window"), py::arg("cu_seqlens"));
  m.def("predict", &predicted, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("profiles"), py::arg("cost"), py::arg("causal"), py::arg("training"),
        py::arg("depth"), py::arg("window"), py::arg("cu_seqlens"));
  m.def("plan_cache", &plan_cache, py::arg("num_tokens"), py::arg("profiles"), py::arg("cost"));
}

}  // namespace ringattn
