// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/definitions.h"
#include "partition/packed.h"
#include "partition/schedule.h"

namespace py = pybind11;

namespace ringattn {
namespace {

using Lengths = std::vector<int64_t>;
using Window = std::pair<int64_t, int64_t>;
using Documents = std::optional<Lengths>;

Partition partition(const std::string& layout, const Lengths& lengths, const Lengths& order,
                    const Lengths& flat_pieces) {
  if (parse_layout(layout) == Layout::kPieces) return partition_of_pieces(lengths, flat_pieces);
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
  const Partition owned = partition(layout, lengths, order, {});
  check_rank(owned, rank);
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (const Segment& piece : owned.segments(rank)) pieces.emplace_back(piece.begin, piece.end);
  return pieces;
}

std::vector<Visit> visits(const std::string& layout, const Lengths& lengths, const Lengths& order,
                          int64_t rank, bool causal, const Lengths& pieces, const Window& window,
                          const Documents& cu_seqlens, const std::optional<std::string>& key_layout,
                          const Lengths& key_lengths, const Lengths& key_order,
                          const Lengths& key_pieces) {
  const Partition queries = partition(layout, lengths, order, pieces);
  check_rank(queries, rank);
  const Partition keys =
      key_layout ? partition(*key_layout, key_lengths, key_order, key_pieces) : queries;
  return schedule(queries, keys, rank,
                  make_mask(causal, window.first, window.second, cu_seqlens, keys.seq_len()));
}

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

VisiblePairs visible_pairs(const Lengths& cu_seqlens, bool causal, const Window& window) {
  const int64_t seq_len = cu_seqlens.empty() ? 0 : cu_seqlens.back();
  return VisiblePairs(make_mask(causal, window.first, window.second, cu_seqlens, seq_len), seq_len);
}

std::vector<Ranges> packed(const Lengths& cu_seqlens, int64_t world_size, bool causal,
                           const Window& window, const std::vector<double>& weights) {
  std::vector<Ranges> all;
  const VisiblePairs pairs = visible_pairs(cu_seqlens, causal, window);
  for (const auto& of_rank : packed_pieces(pairs, world_size, weights)) {
    Ranges& ranges = all.emplace_back();
    for (const Segment& piece : of_rank) ranges.emplace_back(piece.begin, piece.end);
  }
  return all;
}

int64_t fetched(const Ranges& pieces, const Lengths& cu_seqlens, bool causal,
                const Window& window) {
  std::vector<Segment> owned;
  for (const auto& [begin, end] : pieces) owned.push_back({begin, end});
  return rows_fetched(visible_pairs(cu_seqlens, causal, window), owned);
}

}  // namespace

void def_partition(py::module_& m) {
  py::class_<RowRange>(m, "RowRange")
      .def_readonly("begin", &RowRange::begin)
      .def_readonly("end", &RowRange::end);
  py::class_<Visit>(m, "Visit")
      .def_readonly("source", &Visit::source)
      .def_readonly("queries", &Visit::queries)
      .def_property_readonly("keys", [](const Visit& visit) { return visit.keys.hull; })
      .def_readonly("num_pairs", &Visit::num_pairs);
  m.def("segments", &segments, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("rank"));
  m.def("schedule", &visits, py::arg("layout"), py::arg("lengths"), py::arg("order"),
        py::arg("rank"), py::arg("causal"), py::arg("pieces") = Lengths(),
        py::arg("window") = Window(Mask::kUnlimited, Mask::kUnlimited),
        py::arg("cu_seqlens") = Documents(), py::arg("key_layout") = std::nullopt,
        py::arg("key_lengths") = Lengths(), py::arg("key_order") = Lengths(),
        py::arg("key_pieces") = Lengths());
  m.def("check_documents", &check_documents, py::arg("cu_seqlens"), py::arg("seq_len"));
  m.def("packed_pieces", &packed, py::arg("cu_seqlens"), py::arg("world_size"), py::arg("causal"),
        py::arg("window"), py::arg("weights"));
  m.def("rows_fetched", &fetched, py::arg("pieces"), py::arg("cu_seqlens"), py::arg("causal"),
        py::arg("window"));
}

}  // namespace ringattn
