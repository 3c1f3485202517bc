// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/export.h"
#include "core/shape.h"
#include "partition/block_rows.h"
#include "partition/mask.h"

namespace ringattn {

enum class Layout { kZigzag, kContiguous, kPieces };

/// "zigzag", "contiguous" or "pieces"; std::invalid_argument otherwise.
RINGATTN_API Layout parse_layout(const std::string& name);
RINGATTN_API const char* layout_name(Layout layout);

/// Which rank owns which tokens.
///
/// contiguous: each rank owns one segment, in the order of `order`.
/// zigzag: the ranks are nested, the first in `order` outermost. Each owns a segment of the head of
/// the sequence, S_r / 2 tokens, and the mirror segment at the tail, the rest of its S_r tokens.
/// Causal work of rank i's queries on rank j's keys is then S_i * S_j / 2, whatever the lengths.
/// pieces: each rank owns any pieces; `order` is 0 .. W-1.
class RINGATTN_API Partition {
 public:
  /// `order` empty: 0 .. W-1. Throws std::invalid_argument for no ranks, negative lengths, an order
  /// that is not a permutation.
  Partition(Layout layout, std::vector<int64_t> lengths, std::vector<int64_t> order = {});
  /// Of any pieces, [W][...]. Throws std::invalid_argument unless the pieces of each rank ascend
  /// and those of all ranks cover [0, S) once.
  explicit Partition(std::vector<std::vector<Segment>> pieces);

  Layout layout() const { return layout_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  const std::vector<int64_t>& order() const { return order_; }
  int64_t world_size() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t seq_len() const { return seq_len_; }

  /// Tokens of `rank`.
  int64_t length(int64_t rank) const { return lengths_.at(rank); }
  /// Tokens of `rank` in the head segment (zigzag), 0 under contiguous.
  int64_t head_length(int64_t rank) const;
  /// The position of `rank` in `order`.
  int64_t place(int64_t rank) const { return place_.at(rank); }
  /// The rank `distance` places after `rank` in `order`, cyclic; negative distances go back.
  int64_t rank_after(int64_t rank, int64_t distance) const;
  /// What `rank` owns, ascending; empty segments are left out.
  std::vector<Segment> segments(int64_t rank) const;
  BlockRows rows(int64_t rank) const { return BlockRows(segments(rank)); }

  friend bool operator==(const Partition& a, const Partition& b) {
    return a.layout_ == b.layout_ && a.lengths_ == b.lengths_ && a.order_ == b.order_ &&
           a.pieces_ == b.pieces_;
  }

 private:
  void set_places();

  Layout layout_;
  std::vector<std::vector<Segment>> pieces_;  // [W], with Layout::kPieces
  std::vector<int64_t> lengths_;              // [W], tokens of each rank
  std::vector<int64_t> order_;                // [W], ranks
  std::vector<int64_t> place_;                // [W], inverse of order_
  int64_t seq_len_ = 0;
};

/// The partition of pieces that come as plain numbers: rank, start and stop of one after the other.
/// Throws std::invalid_argument for ranks out of range, lengths that are not those of the pieces,
/// and as the constructor.
RINGATTN_API Partition partition_of_pieces(const std::vector<int64_t>& lengths,
                                           const std::vector<int64_t>& flat);

}  // namespace ringattn
