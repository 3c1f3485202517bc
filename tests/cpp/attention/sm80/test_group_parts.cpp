// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm80/group_parts.h"
#include "catch.h"

// Into how many parts the heads of a group are divided in a backward of the portable kernels.

namespace {

using namespace ringattn;
using cuda::sm80::choose_group_parts;

// B 1, D 128. A diagonal of num_keys hides nothing.
BlockAttentionBackwardParams call(int num_heads, int num_kv_heads, int num_queries, int num_keys,
                                  int diagonal) {
  BlockAttentionBackwardParams p;
  p.batch = 1;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = 128;
  p.num_queries = num_queries;
  p.num_keys = num_keys;
  p.diagonal = diagonal;
  return p;
}
int causal_parts(int num_heads, int num_kv_heads, int tokens) {
  return choose_group_parts(call(num_heads, num_kv_heads, tokens, tokens, 0), 132);
}

TEST_CASE("heads of a group are divided where the longest tiles of keys would end late") {
  CHECK(causal_parts(32, 8, 1024) == 4);  // all of a group
  CHECK(causal_parts(32, 8, 2048) == 2);
  CHECK(causal_parts(32, 8, 4096) == 1);
  // Tiles of one length for nearly all multiprocessors.
  CHECK(choose_group_parts(call(32, 8, 2048, 2048, 2048), 132) == 1);
  CHECK(choose_group_parts(call(32, 8, 2048, 1024, 1024), 132) == 2);
}

TEST_CASE("parts of a group are of one size") {
  CHECK(causal_parts(8, 8, 256) == 1);
  CHECK(causal_parts(6, 1, 64) == 6);
  CHECK(causal_parts(7, 1, 64) == 7);
  for (int tokens = 64; tokens <= 32768; tokens *= 2) {
    const int parts = causal_parts(6, 1, tokens);
    CHECK(6 % parts == 0);
  }
}

TEST_CASE("no group is divided into many more parts than are needed") {
  CHECK(causal_parts(28, 4, 4096) == 1);  // two would do, of seven
  CHECK(causal_parts(28, 4, 512) == 7);
  // All keys but the last are seen by all rows.
  CHECK(choose_group_parts(call(32, 8, 1024, 8192, 7168), 132) == 1);
  CHECK(choose_group_parts(call(32, 8, 1024, 0, 0), 132) == 1);
  CHECK(choose_group_parts(call(0, 0, 1024, 1024, 0), 132) == 1);
}

TEST_CASE("ranges of a table count as whole") {
  BlockAttentionBackwardParams p = call(32, 8, 2048, 2048, 0);
  const int32_t unread = 0;
  p.query_ranges = &unread;
  CHECK(choose_group_parts(p, 132) == 1);
}

}  // namespace
