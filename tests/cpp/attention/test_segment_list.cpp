// SPDX-License-Identifier: Apache-2.0
// Lists of key segments that take several launches.
#include <algorithm>
#include <vector>

#include "attention/cuda/segment_list.h"
#include "catch.h"

using ringattn::BlockAttentionParams;
using ringattn::KeySegment;
using ringattn::cuda::launch_of_list;

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
