// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/definitions.h"
#include "partition/schedule.h"

namespace py = pybind11;

namespace ringattn {
namespace {

using Lengths = std::vector<int64_t>;
using Pieces = std::vector<std::tuple<int64_t, int64_t, int64_t>>;  // rank, start, stop

Partition partition(const std::string& layout, const Lengths& lengths, const Lengths& order,
                    const Pieces& pieces) {
  if (parse_layout(layout) != Layout::kPieces)
    return Partition(parse_layout(layout), lengths, order);
  std::vector<std::vector<Segment>> of_rank(lengths.size());
  for (const auto& [rank, start, stop] : pieces) of_rank.at(rank).push_back({start, stop});
  return Partition(std::move(of_rank));
}

void check_rank(const Partition& partition, int64_t rank) {
  if (rank < 0 || rank >= partition.world_size()) {
    throw std::invalid_argument("rank must lie in [0, " + std::to_string(partition.world_size()) +
                                "), got " + std::to_string(rank));
  }
}

std::vector<std::pair<int64_t, int64_t>> segments(const std::string& layout, const Lengths& lengths,
                                                  const Lengths& order, int64_t rank) {
  const Partition owned = partition(layout, lengths, order, {});
  check_rank(owned, rank);
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (const Segment& piece : owned.segments(rank)) pieces.emplace_back(piece.begin, piece.end);
  return pieces;
}

std::vector<Visit> visits(const std::string& layout, const Lengths& lengths, const Lengths& order,
                          int64_t rank, bool causal, const Pieces& pieces,
                          const std::pair<int64_t, int64_t>& window, const Lengths& cu_seqlens) {
  const Partition owned = partition(layout, lengths, order, pieces);
  check_rank(owned, rank);
  return schedule(owned, rank, {causal, window.first, window.second, cu_seqlens});
}

}  // namespace

void def_partition(py::module_& m) {
  py::class_<RowRange>(m, "RowRange")
      .def_readonly("begin", &RowRange::begin)
      .def_readonly("end", &RowRange::end);
  py::class_<Visit>(m, "Visit")
      .def_readonly("source", &Visit::source)
      .def_readonly("queries", &Visit::queries)
      .def_readonly("keys", &Visit::keys)
      .def_readonly("num_pairs", &Visit::num_pairs);
  m.def("segments", &segments, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("rank"));
  m.def("schedule", &visits, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("rank"), py::arg("causal"), py::arg("pieces") = Pieces(),
        py::arg("window") = std::pair<int64_t, int64_t>(Mask::kUnlimited, Mask::kUnlimited),
        py::arg("cu_seqlens") = Lengths());
}

}  // namespace ringattn
