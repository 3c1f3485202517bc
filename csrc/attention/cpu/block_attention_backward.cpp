// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/block_attention_backward.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "attention/cpu/intervals.h"

namespace ringattn::cpu {
namespace {

// Keys that are computed together.
constexpr int64_t kChunkKeys = 128;

Intervals rows_that_see(const KeyBlock& block, int64_t num_queries) {
  if (block.query_ranges.defined()) return intervals_of(block.query_ranges, num_queries);
  const int64_t num_keys = block.k.size(1);
  Intervals intervals;
  for (int64_t key = 0; key < num_keys; ++key) {
    int64_t begin = block.first_query;
    if (block.diagonal < num_keys) {
      // A diagonal far below 0 hides everything; key - diagonal must not overflow.
      begin = std::max(begin, key - std::max(block.diagonal, -num_queries - 1));
    }
    intervals.begin.push_back(begin);
    intervals.end.push_back(num_queries);
  }
  return intervals;
}

// One call, over tensors [B, H_kv, G, S_q, D] and [B, H_kv, S_k, D] in the state's dtype, G query
// heads for each key head.
class Backward {
 public:
  Backward(const at::Tensor& q, const KeyBlock& block, const Scoring& scoring,
           const RowGradients& rows)
      : scoring_(scoring),
        type_(state_dtype(q.scalar_type())),
        group_size_(q.size(2) / block.k.size(2)),
        unseen_(by_group(rows.lse.isneginf().transpose(1, 2).unsqueeze(3))),
        lse_(by_group(rows.lse.transpose(1, 2).unsqueeze(3)).masked_fill(unseen_, 0.0)),
        delta_(by_group(rows.delta.transpose(1, 2).unsqueeze(3)).masked_fill(unseen_, 0.0)),
        q_(by_group(q.to(type_))),
        // A row that sees nothing adds nothing, whatever its gradient is.
        grad_out_(by_group(rows.grad_out.to(type_)).masked_fill(unseen_, 0.0)),
        k_(block.k.to(type_).transpose(1, 2)),
        v_(block.v.to(type_).transpose(1, 2)) {}

  bool finite() const {
    const auto finite = [](const at::Tensor& x) { return at::isfinite(x).all().item<bool>(); };
    return finite(q_) && finite(k_) && finite(v_) && finite(grad_out_);
  }

  /// The keys [first, chunk.end), which rows of the chunk's hull see.
  void add(int64_t first, const IntervalChunk& chunk, const Intervals& intervals,
           const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv) const {
    const int64_t num_keys = chunk.end - first, begin = chunk.hull_begin,
                  num_rows = chunk.hull_end - begin;
    const auto bounds = [&](const std::vector<int64_t>& all) {
      return at::tensor(at::ArrayRef<int64_t>(all.data() + first, num_keys), at::kLong);
    };
    const at::Tensor rows = at::arange(begin, begin + num_rows, at::kLong).unsqueeze(1);
    const at::Tensor of_rows =
        unseen_.narrow(3, begin, num_rows);  // [B, H_kv, G, rows, 1]: broadcasts over keys
    const at::Tensor hidden = rows.lt(bounds(intervals.begin))
                                  .logical_or_(rows.ge(bounds(intervals.end)))
                                  .logical_or(of_rows);
    const auto flat = [](const at::Tensor& x) { return x.flatten(2, 3); };  // [B, H_kv, G rows, _]
    const auto rows_of = [&](const at::Tensor& x) { return x.narrow(3, begin, num_rows); };
    const at::Tensor q = flat(rows_of(q_)), grad_out = flat(rows_of(grad_out_));
    const at::Tensor k = k_.narrow(2, first, num_keys), v = v_.narrow(2, first, num_keys);
    const auto products = [&](const at::Tensor& a, const at::Tensor& b) {
      return at::matmul(a, b.transpose(2, 3)).unflatten(2, {group_size_, num_rows});
    };

    at::Tensor scores = products(q, k).mul_(scoring_.scale), slope;
    if (scoring_.softcap != 0.0) {
      const double softcap =
          scores.scalar_type() == at::kDouble
              ? scoring_.softcap
              : std::clamp<double>(scoring_.softcap, kSmallestSoftcap, kLargestSoftcap);
      const at::Tensor capped = scores.div_(softcap).tanh_();
      slope = capped.square().neg_().add_(1.0);
      scores = capped.mul(softcap);
    }
    // Hidden pairs are selected, not multiplied: what they hold may be NaN. No weight exceeds 1;
    // large scores may, by a last bit that the forward rounded otherwise.
    const at::Tensor weights =
        scores.sub_(rows_of(lse_)).clamp_max_(0.0).exp_().masked_fill_(hidden, 0.0);
    at::Tensor grad_scores = products(grad_out, v).sub_(rows_of(delta_)).mul_(weights);
    if (slope.defined()) grad_scores.mul_(slope);
    grad_scores = flat(grad_scores.mul_(scoring_.scale).masked_fill_(hidden, 0.0));

    dv.narrow(1, first, num_keys)
        .copy_(at::matmul(flat(weights).transpose(2, 3), grad_out).transpose(1, 2));
    dk.narrow(1, first, num_keys).copy_(at::matmul(grad_scores.transpose(2, 3), q).transpose(1, 2));
    dq.narrow(1, begin, num_rows)
        .add_(at::matmul(grad_scores, k)
                  .unflatten(2, {group_size_, num_rows})
                  .flatten(1, 2)
                  .transpose(1, 2));
  }

 private:
  // [B, S_q, H, _] -> [B, H_kv, G, S_q, _]
  at::Tensor by_group(const at::Tensor& x) const {
    return x.transpose(1, 2).unflatten(1, {x.size(2) / group_size_, group_size_});
  }

  const Scoring& scoring_;
  const at::ScalarType type_;
  const int64_t group_size_;
  const at::Tensor unseen_, lse_, delta_;  // [B, H_kv, G, S_q, 1]
  const at::Tensor q_, grad_out_;          // [B, H_kv, G, S_q, D]
  const at::Tensor k_, v_;                 // [B, H_kv, S_k, D]
};

}  // namespace

void block_attention_backward(const at::Tensor& q, const KeyBlock& block, const Scoring& scoring,
                              const RowGradients& rows, const at::Tensor& dk,
                              const at::Tensor& dv) {
  dk.zero_();
  dv.zero_();
  const Intervals intervals = rows_that_see(block, q.size(1));
  const Backward backward(q, block, scoring, rows);
  // A product with 0 is NaN where the other factor is not finite: alone, a key meets only the rows
  // that see it.
  const int64_t max_keys = backward.finite() ? kChunkKeys : 1;
  IntervalChunk chunk;
  for (int64_t first = 0; first < intervals.size(); first = chunk.end) {
    chunk = chunk_of(intervals, first, max_keys);
    if (chunk.hull_begin < chunk.hull_end) backward.add(first, chunk, intervals, rows.dq, dk, dv);
  }
}

}  // namespace ringattn::cpu
