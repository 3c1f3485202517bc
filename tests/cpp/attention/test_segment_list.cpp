// SPDX-License-Identifier: Apache-2.0
// Lists of key segments that take several launches.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/block_attention.h"
#include "attention/cuda/segment_list.h"
#include "catch.h"
#include "reference.h"

using ringattn::AttentionResult;
using ringattn::Band;
using ringattn::BlockAttentionParams;
using ringattn::KeyBlock;
using ringattn::KeySegment;
using ringattn::cuda::launch_of_list;
using ringattn::testing::max_error;
using ringattn::testing::reference_band_attention;

namespace {

constexpr int kRows = 300, kFinalBegin = 37, kFinalEnd = 190;

}  // namespace

TEST_CASE("the launches of a list attend each segment once, in order, into one state") {
  float out, state, lse;
  constexpr int kMaxSegments = 16;
  for (const int num_segments : {1, 15, 16, 17, 20, 32, 40}) {
    for (const bool fold : {false, true}) {
      const std::vector<KeySegment> segments(num_segments);
      BlockAttentionParams list;
      list.num_queries = kRows;
      list.segments = segments.data();
      list.num_segments = num_segments;
      list.out.data = &out;
      list.state.data = &state;
      list.lse = &lse;
      list.fold = fold;
      list.final_begin = kFinalBegin;
      list.final_end = kFinalEnd;
      INFO(num_segments << " segments, fold " << fold);

      int attended = 0;
      while (attended < num_segments) {
        const BlockAttentionParams launch = launch_of_list(list, attended, kMaxSegments);
        CHECK(launch.segments == segments.data() + attended);
        REQUIRE(launch.num_segments == std::min(num_segments - attended, kMaxSegments));
        // The first launch folds what the call folds, the others what it has left.
        CHECK(launch.fold == (fold || attended > 0));
        attended += launch.num_segments;
        // All rows are in the state until the last launch, which leaves final ones rounded.
        const bool is_last = attended == num_segments;
        CHECK(launch.out.data == (is_last ? &out : nullptr));
        CHECK(launch.final_begin == (is_last ? kFinalBegin : 0));
        CHECK(launch.final_end == (is_last ? kFinalEnd : 0));
        CHECK(launch.state.data == &state);
        CHECK(launch.lse == &lse);
        CHECK(launch.num_queries == kRows);
      }
    }
  }
}

TEST_CASE("launches of a list, run one after the other on the CPU, are attention over all of it") {
  constexpr int kNumSegments = 20, kMaxSegments = 16, kLateRow = 20, kQueries = 40;
  constexpr double kScale = 0.3;
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kDouble);
  const at::Tensor q = at::randn({2, kQueries, 4, 8}, options);
  std::vector<KeyBlock> blocks;
  std::vector<at::Tensor> keys, values;
  std::vector<Band> bands;
  int64_t num_keys = 0;
  for (int i = 0; i < kNumSegments; ++i) {
    keys.push_back(at::randn({2, 1 + i % 5, 2, 8}, options));
    values.push_back(at::randn(keys[i].sizes(), options));
    Band band = Band::whole(kQueries, keys[i].size(1));
    band.query_begin = i % 3 == 0 ? kLateRow : 0;
    blocks.push_back({keys[i], values[i], band});
    band.key_begin += num_keys;
    num_keys = band.key_end += num_keys;
    bands.push_back(band);
  }
  const std::vector<KeySegment> segments(kNumSegments);
  BlockAttentionParams list;
  list.segments = segments.data();
  list.num_segments = kNumSegments;
  list.final_begin = 7;
  list.final_end = kQueries;

  AttentionResult result;
  result.out = at::full(q.sizes(), std::nan(""), options);
  result.state = at::full(q.sizes(), std::nan(""), options);
  result.lse = at::full({2, 4, kQueries}, std::nan(""), options);
  for (int first = 0; first < kNumSegments; first += kMaxSegments) {
    const BlockAttentionParams launch = launch_of_list(list, first, kMaxSegments);
    result.fold = launch.fold;
    result.final_begin = launch.final_begin;
    result.final_end = launch.final_end;
    const auto begin = blocks.begin() + (launch.segments - segments.data());
    ringattn::block_attention(q, {begin, begin + launch.num_segments}, kScale, result);
    // Kernels leave final rows out of the state.
    result.state.narrow(1, launch.final_begin, launch.final_end - launch.final_begin)
        .fill_(std::nan(""));
  }
  const auto [expected, expected_lse] =
      reference_band_attention(q, at::cat(keys, 1), at::cat(values, 1), kScale, bands);
  const auto first_rows = [](const at::Tensor& x) { return x.narrow(1, 0, 7); };
  const auto final_rows = [](const at::Tensor& x) { return x.narrow(1, 7, kQueries - 7); };
  CHECK(max_error(result.lse, expected_lse) < 1e-11);
  CHECK(max_error(first_rows(result.state), first_rows(expected)) < 1e-11);
  CHECK(max_error(final_rows(result.out), final_rows(expected)) < 1e-11);
  CHECK(first_rows(result.out).isnan().all().item<bool>());
}
