// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/block_attention.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/cpu/intervals.h"
#include "attention/merge_states.h"

namespace ringattn::cpu {
namespace {

State empty_state(const at::Tensor& q) {
  const auto options = q.options().dtype(state_dtype(q.scalar_type()));
  return {at::zeros(q.sizes(), options),
          at::full({q.size(0), q.size(2), q.size(1)}, -std::numeric_limits<double>::infinity(),
                   options)};
}

// With fewer keys than a vector holds, ATen's kernel compares them one by one, which loses a NaN.
constexpr int64_t kFewKeys = 16;

// Plain attention in float64 to the keys that `visible`, bool [S_q, S_k], shows; undefined: to all.
// Scores that the state's dtype cannot hold are -inf: a row without other scores has weight 0.
State dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const Scoring& scoring, const at::Tensor& visible) {
  const int64_t group_size = q.size(2) / k.size(2);
  const auto by_query_head = [&](const at::Tensor& x) {
    return x.to(at::kDouble).repeat_interleave(group_size, 2).transpose(1, 2);  // [B, H, S_k, D]
  };
  at::Tensor scores =
      q.to(at::kDouble).transpose(1, 2).matmul(by_query_head(k).transpose(2, 3)).mul(scoring.scale);
  if (scoring.softcap != 0.0) {
    scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap);
  }
  if (visible.defined()) {
    scores.masked_fill_(visible.logical_not(), -std::numeric_limits<double>::infinity());
  }
  const at::Tensor lse = scores.logsumexp(-1).to(q.scalar_type());  // [B, H, S_q]
  const at::Tensor out = scores.softmax(-1).matmul(by_query_head(v)).to(q.scalar_type());
  out.masked_fill_(lse.isneginf().unsqueeze(-1), 0.0);
  return {out.transpose(1, 2), lse};
}

// ATen's CPU flash kernel; q, k and v have a unit last stride, `causal` is diagonal 0. It crashes
// on an empty tensor.
State call_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                  bool causal) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), /*dropout_p=*/0.0, causal,
      /*attn_mask=*/{}, scale);
  return {out.transpose(1, 2), lse};
}

// Reads the kernel's lse in memory order: tensor operations would take as long as a small call.
bool has_zero(const at::Tensor& lse) {
  TORCH_INTERNAL_ASSERT(lse.is_non_overlapping_and_dense());
  return AT_DISPATCH_FLOATING_TYPES(lse.scalar_type(), "has_zero", [&] {
    const auto* begin = lse.const_data_ptr<scalar_t>();
    const auto* end = begin + lse.numel();
    return std::find(begin, end, scalar_t{0}) != end;
  });
}

// Note: the kernel returns lse 0 for a row whose scores are all -inf, to which finite inputs may
// overflow; merged with other keys, such a row would have the weight of a score of 0. With values
// of 1 the output of every other row is 1, and that of these rows is 0.
void empty_rows_without_scores(const State& state, const at::Tensor& q, const at::Tensor& k,
                               double scale, bool causal) {
  if (!has_zero(state.lse)) return;  // the usual case
  // Under a triangle the first row's only score is often 0: later rows and keys are not recomputed.
  const int64_t num_rows = state.lse.eq(0).nonzero().select(1, 2).max().item<int64_t>() + 1;
  const at::Tensor keys = k.narrow(1, 0, causal ? std::min(num_rows, k.size(1)) : k.size(1));
  const State ones = call_kernel(q.narrow(1, 0, num_rows), keys,
                                 at::ones(keys.sizes(), keys.options()), scale, causal);
  const at::Tensor lse = state.lse.transpose(1, 2).narrow(1, 0, num_rows);
  const at::Tensor empty = lse.eq(0).logical_and(ones.out.select(3, 0).eq(0));  // [B, num_rows, H]
  lse.masked_fill_(empty, -std::numeric_limits<double>::infinity());
  state.out.narrow(1, 0, num_rows).masked_fill_(empty.unsqueeze(-1), 0.0);
}

// Attention under diagonal 0 or without a diagonal. Every row sees a key here.
State flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                      bool causal) {
  if (k.size(1) < kFewKeys) {
    const auto all = at::ones({q.size(1), k.size(1)}, q.options().dtype(at::kBool));
    return dense_attention(q, k, v, scale, causal ? all.tril() : at::Tensor());
  }
  // Note: the kernel masks with -inf before it scales: a scale of 0 makes that NaN, a negative one
  // +inf. The sign goes into q, and so does a scale of 0, where NaN stays NaN.
  const double rounded = q.scalar_type() == at::kDouble ? scale : static_cast<float>(scale);
  const double sign = rounded > 0 ? 1.0 : rounded < 0 ? -1.0 : 0.0;
  const at::Tensor signed_q = sign > 0 ? q : q.mul(sign);
  const double magnitude = sign == 0 ? 1.0 : scale * sign;
  const State state = call_kernel(signed_q, k, v, magnitude, causal);
  empty_rows_without_scores(state, signed_q, k, magnitude, causal);
  return state;
}

Intervals keys_seen(const KeyBlock& block, int64_t num_queries) {
  const int64_t num_keys = block.k.size(1);
  if (block.key_ranges.defined()) return intervals_of(block.key_ranges, num_keys);
  Intervals intervals;
  for (int64_t row = 0; row < num_queries; ++row) {
    int64_t end = num_keys;
    if (row < block.first_query) {
      end = 0;
    } else if (block.diagonal < num_keys) {
      end = std::clamp<int64_t>(row + 1 + block.diagonal, 0, num_keys);
    }
    intervals.begin.push_back(0);
    intervals.end.push_back(end);
  }
  return intervals;
}

// Rows that dense_attention computes together.
constexpr int64_t kChunkRows = 128;

// Any intervals and softcap; each chunk of rows reads only the keys that its rows see.
State attend_intervals(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const Scoring& scoring, const Intervals& intervals) {
  State state = empty_state(q);
  IntervalChunk chunk;
  for (int64_t first = 0; first < q.size(1); first = chunk.end) {
    chunk = chunk_of(intervals, first, kChunkRows);
    const int64_t num_rows = chunk.end - first, num_keys = chunk.hull_end - chunk.hull_begin;
    if (num_keys <= 0) continue;
    const auto bounds = [&](const std::vector<int64_t>& all) {
      return at::tensor(at::ArrayRef<int64_t>(all.data() + first, num_rows), at::kLong)
          .unsqueeze(1);
    };
    const at::Tensor keys = at::arange(chunk.hull_begin, chunk.hull_end, at::kLong);
    const at::Tensor visible =
        keys.ge(bounds(intervals.begin)).logical_and_(keys.lt(bounds(intervals.end)));
    const State part =
        dense_attention(q.narrow(1, first, num_rows), k.narrow(1, chunk.hull_begin, num_keys),
                        v.narrow(1, chunk.hull_begin, num_keys), scoring, visible);
    state.out.narrow(1, first, num_rows).copy_(part.out);
    state.lse.narrow(2, first, num_rows).copy_(part.lse);
  }
  return state;
}

// All of these rows and keys under a diagonal. It takes at most two calls of the kernel: rows that
// see nothing are cut off, and keys that every row sees are split from those under the triangle.
//
//   diagonal < 0: rows i < -diagonal see nothing; the others are the triangle of diagonal 0.
//   diagonal > 0: every row sees keys j < diagonal; the keys after them are the triangle of 0.
State attend_wide(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                  int64_t diagonal) {
  const int64_t num_queries = q.size(1);
  const int64_t num_keys = k.size(1);
  if (q.numel() == 0 || num_keys == 0 || diagonal <= -num_queries) return empty_state(q);
  if (diagonal >= num_keys - 1) return flash_attention(q, k, v, scale, /*causal=*/false);
  if (diagonal == 0) return flash_attention(q, k, v, scale, /*causal=*/true);

  if (diagonal < 0) {
    State state = empty_state(q);
    const State seeing =
        flash_attention(q.narrow(1, -diagonal, num_queries + diagonal), k, v, scale, true);
    state.out.narrow(1, -diagonal, num_queries + diagonal).copy_(seeing.out);
    state.lse.narrow(2, -diagonal, num_queries + diagonal).copy_(seeing.lse);
    return state;
  }
  State state =
      flash_attention(q, k.narrow(1, 0, diagonal), v.narrow(1, 0, diagonal), scale, false);
  const int64_t rest = num_keys - diagonal;
  const State triangle =
      flash_attention(q, k.narrow(1, diagonal, rest), v.narrow(1, diagonal, rest), scale, true);
  merge_states_(state.out, state.lse, triangle.out, triangle.lse);
  return state;
}

}  // namespace

State attend(const at::Tensor& q, const KeyBlock& block, const Scoring& scoring) {
  const auto wide = [type = state_dtype(q.scalar_type())](const at::Tensor& x) {
    const at::Tensor widened = x.to(type);
    return widened.stride(-1) == 1 ? widened : widened.contiguous();
  };
  const at::Tensor k = wide(block.k), v = wide(block.v);
  if (block.key_ranges.defined() || scoring.softcap != 0.0) {
    return attend_intervals(wide(q), k, v, scoring, keys_seen(block, q.size(1)));
  }
  const int64_t first = block.first_query, num_rows = q.size(1) - first;
  const int64_t diagonal =
      block.diagonal == KeyBlock::kNoMask ? KeyBlock::kNoMask : block.diagonal + first;
  const State seeing =
      attend_wide(wide(q.narrow(1, first, num_rows)), k, v, scoring.scale, diagonal);
  if (first == 0) return seeing;
  State state = empty_state(q);
  state.out.narrow(1, first, num_rows).copy_(seeing.out);
  state.lse.narrow(2, first, num_rows).copy_(seeing.lse);
  return state;
}

void add_sinks(const State& state, const Scoring& scoring) {
  if (!scoring.sinks.defined()) return;
  // A sink is a state of its own, of a key with that score whose value is 0.
  merge_states_(state.out, state.lse, at::zeros_like(state.out),
                scoring.sinks.unsqueeze(-1).expand_as(state.lse));
}

void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks,
                     const Scoring& scoring, const AttentionResult& result) {
  State state;
  if (result.fold) state = {result.state, result.lse};
  for (const KeyBlock& block : blocks) {
    const State part = attend(q, block, scoring);
    if (state.out.defined()) {
      merge_states_(state.out, state.lse, part.out, part.lse);
    } else {
      state = part;
    }
  }
  if (!state.out.defined()) state = empty_state(q);
  const int64_t num_final = result.final_end - result.final_begin;
  const State final = {state.out.narrow(1, result.final_begin, num_final),
                       state.lse.narrow(2, result.final_begin, num_final)};
  add_sinks(final, scoring);
  if (!result.fold) {
    result.lse.copy_(state.lse);
    if (result.state.defined()) result.state.copy_(state.out);
  }
  if (result.out.defined()) result.out.narrow(1, result.final_begin, num_final).copy_(final.out);
}

}  // namespace ringattn::cpu
