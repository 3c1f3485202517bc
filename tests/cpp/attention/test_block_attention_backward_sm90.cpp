// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <initializer_list>

#include "attention/cuda/sm90/backward/cluster_choice.h"
#include "backward_calls.h"

// What the kernels for Hopper do differently from call to call: clusters that share the heads of a
// group, pairs of thread blocks that share keys, several work tiles for a thread block, in rounds
// or by ticket, registers that depend on D and the softcap. The calls of
// test_block_attention_backward.cpp run there, too.

namespace {

using namespace ringattn::testing::backward_calls;
using ringattn::DataType;

constexpr DataType kTypes[] = {DataType::kFloat16, DataType::kBFloat16};

/// Whether pairs of thread blocks compute it where 132 run at one time.
bool is_for_pairs(const Case& c) {
  using namespace ringattn::cuda::sm90;
  const ringattn::cuda::QueryBounds bounds = {c.num_queries, c.num_keys, c.diagonal, c.first_query,
                                              nullptr};
  const auto tiles_of = [&](int keys) {
    const auto num_key_tiles = static_cast<int>(ringattn::ceil_div(c.num_keys, keys));
    return WorkTiles{bounds, c.batch * c.kv_heads, num_key_tiles, 64, keys, c.heads / c.kv_heads};
  };
  return gains_by_pairs(tiles_of(128), tiles_of(256), c.leaves_room ? 131 : 132, c.deterministic);
}

void check_scales(std::initializer_list<int> head_dims, std::initializer_list<double> softcaps,
                  std::initializer_list<double> scales) {
  for (const DataType dtype : kTypes) {
    for (const int head_dim : head_dims) {
      for (const double softcap : softcaps) {
        for (const double scale : scales) {
          Case c;
          c.dtype = dtype;
          c.head_dim = head_dim;
          c.softcap = softcap;
          c.scale = scale;
          c.empty_rows = true;
          check(c);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("gradients on Hopper of every number of heads in a group") {
  if (!has_hopper()) return;
  uint32_t seed = 0;
  for (const DataType dtype : kTypes) {
    for (const int head_dim : {8, 64, 72, 128, 136, 256}) {
      for (const int group : {1, 2, 3, 4, 8}) {
        for (const Keys keys : {Keys::kDiagonal, Keys::kWindow, Keys::kDocuments, Keys::kRandom}) {
          Case c;
          c.dtype = dtype;
          c.keys = keys;
          c.head_dim = head_dim;
          c.scale = 1.0 / std::sqrt(double(head_dim));
          c.batch = 1;
          c.heads = 2 * group;
          c.strided = seed % 3 == 0;
          c.empty_rows = seed % 2 == 0;
          c.seed = ++seed;
          check(c);
        }
      }
    }
  }
}

TEST_CASE("gradients on Hopper of several tiles of keys for a thread block") {
  if (!has_hopper()) return;
  for (const uint32_t seed : {1u, 2u}) {  // in rounds, and by ticket
    for (const int head_dim : {16, 256}) {
      for (const Keys keys : {Keys::kDiagonal, Keys::kDocuments}) {
        for (const double softcap : {0.0, 15.0}) {
          Case c;
          c.seed = seed;
          c.keys = keys;
          c.head_dim = head_dim;
          c.softcap = softcap;
          c.scale = 1.0 / std::sqrt(double(head_dim));
          c.batch = 5;
          c.kv_heads = 8;
          c.heads = seed % 2 == 0 ? 16 : 8;
          c.num_queries = 70;
          c.num_keys = 900;  // 8 tiles: 320 of all heads. D 256: 5 for each pair
          c.diagonal = 850;
          c.leaves_room = seed == 2;
          check(c);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE_SIG("deterministic gradients on Hopper are right, and the same bits each time",
                       "", ((int kHeadDim), kHeadDim), 16, 72, 128) {
  if (!has_hopper()) return;
  for (const int batch : {1, 5}) {  // few tiles, of clusters, and several rounds of them
    for (const int group : {1, 4}) {
      for (const Keys keys : {Keys::kAll, Keys::kDiagonal, Keys::kWindow, Keys::kDocuments}) {
        Case c;
        c.keys = keys;
        c.head_dim = kHeadDim;
        c.batch = batch;
        c.kv_heads = 8;
        c.heads = 8 * group;
        c.num_queries = batch == 1 ? 150 : kHeadDim <= 64 ? 140 : 70;  // two or more query tiles
        c.num_keys = 900;
        c.diagonal = 850 - c.num_queries;
        c.empty_rows = true;
        c.softcap = kHeadDim == 72 ? 0.0 : 15.0;
        c.deterministic = true;
        c.leaves_room = group == 4;
        INFO(c.text());
        Problem problem(c);
        differentiate(problem);
        check(problem);
        check_repeats(problem, 5);
      }
    }
  }
}

TEST_CASE("gradients on Hopper with a softcap, of any scale") {
  if (!has_hopper()) return;
  check_scales({64, 72, 128, 192, 256}, {0.0, 0.5, 15.0}, {0.0, 0.125, -0.125});
}

TEST_CASE("gradients on Hopper of D 256 where a half of a tile of keys is empty or unseen") {
  if (!has_hopper()) return;
  for (const DataType dtype : kTypes) {
    for (const int num_keys : {1, 63, 64, 65, 128, 129, 191, 193}) {
      for (const Keys keys : {Keys::kAll, Keys::kDiagonal, Keys::kDocuments, Keys::kNone}) {
        Case c;
        c.dtype = dtype;
        c.keys = keys;
        c.head_dim = 256;
        c.scale = 0.0625;
        c.batch = 1;
        c.num_keys = num_keys;
        c.diagonal = num_keys / 2 - 100;
        c.seed = num_keys;
        check(c);
      }
    }
  }
}

TEST_CASE("gradients on Hopper of pairs of thread blocks") {
  if (!has_hopper()) return;
  uint32_t seed = 0;
  for (const DataType dtype : kTypes) {
    for (const int head_dim : {72, 128}) {
      // The last pair has both halves; a part of the second; none of it; one key.
      for (const int num_keys : {512, 391, 300, 257}) {
        for (const int diagonal : {512, 129, -40}) {
          Case c;
          c.dtype = dtype;
          c.head_dim = head_dim;
          c.seed = 2 * ++seed + 1;  // odd: without a semaphore, as pairs are
          c.kv_heads = 33;          // of two pairs each: one round
          c.batch = num_keys > 384 ? 1 + seed % 2 : 1;
          c.heads = seed % 5 == 0 ? 66 : 33;
          c.num_queries = seed % 3 != 0 ? 130 : num_keys > 384 ? 60 : 100;
          c.num_keys = num_keys;
          c.diagonal = diagonal;
          c.first_query = seed % 4 != 0 ? 0 : c.num_queries > 70 ? 70 : 20;
          c.scale = (seed % 7 == 0 ? -1 : 1) / std::sqrt(double(head_dim));
          c.empty_rows = seed % 2 == 0;
          c.strided = seed % 3 == 1;
          INFO(c.text());
          REQUIRE(is_for_pairs(c));
          check(c);
        }
      }
    }
  }
}

TEST_CASE("deterministic gradients on Hopper of pairs of thread blocks") {
  if (!has_hopper()) return;
  struct Shape {
    int kv_heads, heads, num_queries, num_keys;
  };
  uint32_t seed = 0;
  // All tiles in one round; in two; in slices of four rounds and of one.
  for (const auto& [kv_heads, heads, num_queries, num_keys] :
       {Shape{33, 33, 130, 391}, {33, 66, 130, 391}, {5, 10, 130, 3900}, {30, 30, 70, 2300}}) {
    for (const int diagonal : {num_keys, num_keys - num_queries - 30}) {
      Case c;
      c.dtype = kTypes[seed % 2];
      c.head_dim = (seed + seed / 2) % 2 == 0 ? 72 : 128;
      c.batch = 1;
      c.heads = heads;
      c.kv_heads = kv_heads;
      c.num_queries = num_queries;
      c.num_keys = num_keys;
      c.diagonal = diagonal;
      c.scale = 1 / std::sqrt(double(c.head_dim));
      c.empty_rows = heads != kv_heads;
      c.leaves_room = num_keys > 391;
      c.deterministic = true;
      c.seed = ++seed;
      INFO(c.text());
      REQUIRE(is_for_pairs(c));
      Problem problem(c);
      differentiate(problem);
      check(problem);
      check_repeats(problem, 5);
    }
  }
}

TEST_CASE("gradients on Hopper of scales at and beyond what a row's term of lse can hold") {
  if (!has_hopper()) return;
  check_scales({8, 64, 128, 256}, {0.0, 15.0}, {0x1p-100, 0x1p-101, -0x1p-100, 1e-39, 4.0, -4.0});
}

TEST_CASE("on Hopper an infinite delta is not a finite gradient of its row, head and keys") {
  if (!has_hopper()) return;
  for (const DataType dtype : kTypes) {
    for (const int head_dim : {64, 128, 256}) {
      for (const float delta : {kInfinity, -kInfinity}) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.keys = Keys::kAll;
        INFO(c.text());
        Problem problem(c);
        const int row = 70, head = 1;
        problem.delta[problem.row_index(0, head, row)] = delta;
        differentiate(problem);

        const size_t begin = (size_t(row) * c.heads + head) * head_dim;
        for (size_t i = begin; i < begin + head_dim; ++i) {
          REQUIRE(!std::isfinite(problem.dq.values[i]));
          problem.dq.values[i] = float(problem.want_dq[i]);
        }
        // All keys of the first batch and head: the row sees them. Its probabilities are NaN, too.
        const int key_row = c.kv_heads * head_dim;
        for (int key = 0; key < c.num_keys; ++key) {
          for (int d = 0; d < head_dim; ++d) {
            const size_t i = size_t(key) * key_row + d;
            REQUIRE(!std::isfinite(problem.dk.values[i]));
            problem.dk.values[i] = float(problem.want_dk[i]);
            problem.dv.values[i] = float(problem.want_dv[i]);
          }
        }
        check(problem);
      }
    }
  }
}
