// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/block_attention.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

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

// Plain attention in float64. Scores that the state's dtype cannot hold are -inf: a row without
// other scores has weight 0.
State dense_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                      const Band& band) {
  const int64_t group_size = q.size(2) / k.size(2);
  const auto by_query_head = [&](const at::Tensor& x) {
    return x.to(at::kDouble).repeat_interleave(group_size, 2).transpose(1, 2);  // [B, H, S_k, D]
  };
  at::Tensor scores =
      q.to(at::kDouble).transpose(1, 2).matmul(by_query_head(k).transpose(2, 3)).mul(scale);
  if (band.has_lower() || band.has_upper()) {
    auto visible = at::ones({q.size(1), k.size(1)}, q.options().dtype(at::kBool));
    if (band.has_upper()) visible = visible.tril(band.upper);
    if (band.has_lower()) visible = visible.triu(band.lower);
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
    const auto diagonal = causal ? std::optional<int64_t>(0) : std::nullopt;
    return dense_attention(q, k, v, scale, Band::whole(q.size(1), k.size(1), diagonal));
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

// Rows of a chunk of `attend_between`.
constexpr int64_t kChunkRows = 128;

// A band with a lower limit, in chunks of rows; each reads only the keys that its rows see.
State attend_between(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                     const Band& band) {
  State state = empty_state(q);
  for (int64_t row = 0; row < q.size(1); row += kChunkRows) {
    const int64_t rows = std::min(kChunkRows, q.size(1) - row);
    const int64_t begin = std::max<int64_t>(0, row + band.lower);
    const int64_t end = std::min(k.size(1), band.upper + row + rows);
    if (begin >= end) continue;
    const Band chunk = {
        0, rows, 0, end - begin, band.lower + row - begin, band.upper + row - begin};
    const State part = dense_attention(q.narrow(1, row, rows), k.narrow(1, begin, end - begin),
                                       v.narrow(1, begin, end - begin), scale, chunk);
    state.out.narrow(1, row, rows).copy_(part.out);
    state.lse.narrow(2, row, rows).copy_(part.lse);
  }
  return state;
}

// All of these rows and keys, of which the band's limits say what is visible. Without a lower limit
// it takes at most two calls of the kernel: rows that see nothing are cut off, and keys that every
// row sees are split from those under the triangle.
//
//   upper < 0: rows i < -upper see nothing; the others are the triangle of diagonal 0.
//   upper > 0: every row sees keys j < upper; the keys after them are the triangle of diagonal 0.
State attend_wide(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                  const Band& band) {
  const int64_t num_queries = q.size(1);
  const int64_t num_keys = k.size(1);
  const int64_t upper = band.upper;
  if (q.numel() == 0 || band.num_pairs() == 0) return empty_state(q);
  if (band.has_lower()) return attend_between(q, k, v, scale, band);
  if (!band.has_upper()) return flash_attention(q, k, v, scale, /*causal=*/false);
  if (upper == 0) return flash_attention(q, k, v, scale, /*causal=*/true);

  if (upper < 0) {
    State state = empty_state(q);
    const State seeing =
        flash_attention(q.narrow(1, -upper, num_queries + upper), k, v, scale, true);
    state.out.narrow(1, -upper, num_queries + upper).copy_(seeing.out);
    state.lse.narrow(2, -upper, num_queries + upper).copy_(seeing.lse);
    return state;
  }
  State state = flash_attention(q, k.narrow(1, 0, upper), v.narrow(1, 0, upper), scale, false);
  const int64_t rest = num_keys - upper;
  const State triangle =
      flash_attention(q, k.narrow(1, upper, rest), v.narrow(1, upper, rest), scale, true);
  merge_states_(state.out, state.lse, triangle.out, triangle.lse);
  return state;
}

}  // namespace

State attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
             const Band& band) {
  const auto wide = state_dtype(q.scalar_type());
  const auto rows = [wide](const at::Tensor& x, int64_t begin, int64_t count) {
    const at::Tensor widened = x.narrow(1, begin, count).to(wide);
    return widened.stride(-1) == 1 ? widened : widened.contiguous();
  };
  return attend_wide(rows(q, band.query_begin, band.num_queries()),
                     rows(k, band.key_begin, band.num_keys()),
                     rows(v, band.key_begin, band.num_keys()), scale, band);
}

void block_attention(const at::Tensor& q, const std::vector<KeyBlock>& blocks, double scale,
                     const AttentionResult& result) {
  State state;
  if (result.fold) {
    state = {result.state, result.lse};
  } else if (blocks.size() != 1 || blocks.front().band.num_queries() != q.size(1)) {
    state = empty_state(q);
  }
  for (const auto& [k, v, band, source] : blocks) {
    const State part = attend(q, k, v, scale, band);
    if (state.out.defined()) {
      merge_states_(state.out.narrow(1, band.query_begin, band.num_queries()),
                    state.lse.narrow(2, band.query_begin, band.num_queries()), part.out, part.lse);
    } else {
      state = part;
    }
  }
  if (!result.fold) {
    result.lse.copy_(state.lse);
    if (result.state.defined()) result.state.copy_(state.out);
  }
  if (result.out.defined()) {
    const int64_t num_final = result.final_end - result.final_begin;
    result.out.narrow(1, result.final_begin, num_final)
        .copy_(state.out.narrow(1, result.final_begin, num_final));
  }
}

}  // namespace ringattn::cpu
