// SPDX-License-Identifier: Apache-2.0
#pragma once

// clang-format off
// Legend of the dimensions, used in every comment of this project.
//
//   B        batch
//   S        tokens of the whole sequence
//   S_r      tokens that rank r owns
//   S_q S_k  query and key rows of one call
//   H        query heads
//   H_kv     key/value heads, H % H_kv == 0; query head h reads key head h / (H / H_kv)
//   D        head dimension
//   W        ranks of a ring
//
// Tensors are [B, S, H, D]; keys and values are never expanded to H heads.
// lse is the log-sum-exp of the scaled scores: natural log, float32 (float64 for float64 inputs),
// [B, H, S_q]. A query that sees no key has out 0 and lse -inf.
// diagonal is torch.tril's: query row i sees key column j when j - i <= diagonal.
// A state is (out, lse) over the keys seen so far; it is float32 whatever the type of the inputs.
// clang-format on
