// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/definitions.h"
#include "partition/schedule.h"

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

}  // namespace

void def_partition(py::module_& m) {
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
}

}  // namespace ringattn
