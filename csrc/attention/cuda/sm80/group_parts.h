// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/query_bounds.h"
#include "attention/params.h"

// Into how many parts the heads of a group are divided in the backward. Plain C++, which tests run
// without a device.

namespace ringattn::cuda::sm80 {

/// How many keys the thread blocks of a multiprocessor have at one time, in tiles of every size.
constexpr int keys_of_multiprocessor(bool is_float32, int head_dim) {
  if (is_float32) return head_dim <= 64 ? 128 : head_dim <= 128 ? 64 : 32;
  return head_dim <= 128 ? 128 : 64;
}

/// A thread block passes all rows that see its keys, for each head of its part. Few tiles of keys,
/// of which the first are seen by many rows, keep some multiprocessors busy when others are done.
/// Each part costs another dk and dv: the fewest are chosen with which the longest thread block
/// takes hardly more than a multiprocessor's share of all rows, and never twice as many as that
/// needs, as where a group has a prime number of heads.
inline int choose_group_parts(const BlockAttentionBackwardParams& p, int multiprocessors) {
  if (p.num_keys == 0 || p.num_kv_heads == 0) return 1;
  const QueryBounds bounds = QueryBounds::on_host(p);
  const auto rows_of = [&](int key) { return double(p.num_queries - bounds.range(key).begin); };
  const double longest = rows_of(0), shortest = rows_of(p.num_keys - 1);
  // The first keys are seen by as many rows; then each by one less.
  const double flat =
      std::clamp(double(bounds.diagonal) + bounds.first_query, 0.0, double(p.num_keys));
  const double rows = flat * longest + (p.num_keys - flat) * (longest + shortest) / 2;
  const double at_once =
      double(keys_of_multiprocessor(p.dtype == DataType::kFloat32, p.head_dim)) * multiprocessors;
  const double share = rows * p.batch * p.num_kv_heads / at_once;
  const double wanted = longest / (1.1 * share);
  const int group = p.num_heads / p.num_kv_heads;
  int parts = 1;
  for (int next = 2; next <= group && parts < wanted; ++next) {
    if (group % next == 0 && next < 2 * wanted) parts = next;
  }
  return parts;
}

}  // namespace ringattn::cuda::sm80
