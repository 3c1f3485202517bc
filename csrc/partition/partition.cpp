// SPDX-License-Identifier: Apache-2.0
#include "partition/partition.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace ringattn {
namespace {

bool is_permutation(std::vector<int64_t> ranks, int64_t world_size) {
  std::sort(ranks.begin(), ranks.end());
  std::vector<int64_t> all(world_size);
  std::iota(all.begin(), all.end(), 0);
  return ranks == all;
}

// As Python prints it: [0, 1].
std::string as_list(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

}  // namespace

Layout parse_layout(const std::string& name) {
  if (name == "zigzag") return Layout::kZigzag;
  if (name == "contiguous") return Layout::kContiguous;
  if (name == "pieces") return Layout::kPieces;
  throw std::invalid_argument("layout must be \"zigzag\" or \"contiguous\", got \"" + name + "\"");
}

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::kZigzag:
      return "zigzag";
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kPieces:
      return "pieces";
  }
  return "";
}

Partition::Partition(Layout layout, std::vector<int64_t> lengths, std::vector<int64_t> order)
    : layout_(layout), lengths_(std::move(lengths)), order_(std::move(order)) {
  const int64_t world_size = this->world_size();
  if (world_size == 0) throw std::invalid_argument("lengths must name at least one rank, got none");
  for (int64_t length : lengths_) {
    if (length < 0) {
      throw std::invalid_argument("lengths must not be negative, got " + std::to_string(length));
    }
    seq_len_ += length;
  }
  if (order_.empty()) {
    order_.resize(world_size);
    std::iota(order_.begin(), order_.end(), 0);
  }
  if (!is_permutation(order_, world_size)) {
    throw std::invalid_argument("order must name each of the " + std::to_string(world_size) +
                                " ranks once, got " + as_list(order_));
  }
  set_places();
}

Partition::Partition(std::vector<std::vector<Segment>> pieces)
    : layout_(Layout::kPieces), pieces_(std::move(pieces)) {
  if (pieces_.empty()) throw std::invalid_argument("pieces must name at least one rank, got none");
  std::vector<Segment> all;
  for (const auto& of_rank : pieces_) {
    int64_t length = 0, last_end = 0;
    for (const Segment& piece : of_rank) {
      if (piece.begin < last_end || piece.begin >= piece.end) {
        throw std::invalid_argument("pieces of a rank must ascend, got [" +
                                    std::to_string(piece.begin) + ", " + std::to_string(piece.end) +
                                    ") after a piece that ends at " + std::to_string(last_end));
      }
      last_end = piece.end;
      length += piece.size();
      all.push_back(piece);
    }
    lengths_.push_back(length);
    seq_len_ += length;
  }
  std::sort(all.begin(), all.end(),
            [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  int64_t covered = 0;
  for (const Segment& piece : all) {
    if (piece.begin != covered) {
      throw std::invalid_argument("pieces must cover each position once, got " +
                                  std::to_string(std::min(piece.begin, covered)) +
                                  (piece.begin < covered ? " twice" : " nowhere"));
    }
    covered = piece.end;
  }
  order_.resize(pieces_.size());
  std::iota(order_.begin(), order_.end(), 0);
  set_places();
}

void Partition::set_places() {
  const int64_t world_size = this->world_size();
  place_.resize(world_size);
  for (int64_t place = 0; place < world_size; ++place) place_[order_[place]] = place;
}

int64_t Partition::head_length(int64_t rank) const {
  return layout_ == Layout::kZigzag ? length(rank) / 2 : 0;
}

int64_t Partition::rank_after(int64_t rank, int64_t distance) const {
  const int64_t world_size = this->world_size();
  return order_[((place(rank) + distance) % world_size + world_size) % world_size];
}

std::vector<Segment> Partition::segments(int64_t rank) const {
  if (layout_ == Layout::kPieces) return pieces_.at(rank);
  int64_t before = 0;  // tokens of the ranks ahead in the order, at the head of the sequence
  int64_t after = 0;   // and at its tail
  for (int64_t ahead = 0; ahead < place(rank); ++ahead) {
    const int64_t other = order_[ahead];
    const int64_t head = layout_ == Layout::kZigzag ? head_length(other) : length(other);
    before += head;
    after += length(other) - head;
  }
  std::vector<Segment> owned;
  if (layout_ == Layout::kContiguous) {
    owned.push_back({before, before + length(rank)});
  } else {
    const int64_t head = head_length(rank);
    const int64_t tail = length(rank) - head;
    owned.push_back({before, before + head});
    owned.push_back({seq_len_ - after - tail, seq_len_ - after});
  }
  std::vector<Segment> segments;
  for (const Segment& segment : owned) {
    if (segment.begin < segment.end) segments.push_back(segment);
  }
  return segments;
}

Partition partition_of_pieces(const std::vector<int64_t>& lengths,
                              const std::vector<int64_t>& flat) {
  std::vector<std::vector<Segment>> pieces(lengths.size());
  for (size_t i = 0; i + 2 < flat.size(); i += 3) {
    if (flat[i] < 0 || flat[i] >= static_cast<int64_t>(lengths.size())) {
      throw std::invalid_argument("ranks of pieces must lie in [0, " +
                                  std::to_string(lengths.size()) + "), got " +
                                  std::to_string(flat[i]));
    }
    pieces[flat[i]].push_back({flat[i + 1], flat[i + 2]});
  }
  Partition partition(std::move(pieces));
  if (partition.lengths() != lengths) {
    throw std::invalid_argument("lengths must be those of the pieces, " +
                                as_list(partition.lengths()) + ", got " + as_list(lengths));
  }
  return partition;
}

}  // namespace ringattn
