// SPDX-License-Identifier: Apache-2.0
// Which modes, pointers and segments of a launch go together.
#include <cstdint>
#include <vector>

#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "catch.h"
#include "geometry.h"

using ringattn::BlockAttentionParams;
using ringattn::Fetch;
using ringattn::KeySegment;
using ringattn::Scheduling;
using ringattn::cuda::sm90::modes_are_valid;
using ringattn::testing::call;
using ringattn::testing::kNoMask;
using ringattn::testing::segment;

TEST_CASE("a launch's modes go with its pointers, counters and segments") {
  std::vector<KeySegment> segments = {segment(100, kNoMask, 0), segment(100, kNoMask, 0)};
  uint32_t counters[8] = {}, failed = 0;
  const auto valid = [&](Scheduling scheduling, Fetch fetch, bool scratch, bool fails,
                         int num_arrivals) {
    BlockAttentionParams p = call(segments, 100, 4, 4);
    p.scheduling = scheduling;
    p.fetch = fetch;
    if (scratch) p.remote_fetch.scratch = {counters, num_arrivals};
    if (fails) p.remote_fetch.failed = &failed;
    return modes_are_valid(p);
  };
  for (const bool is_remote : {false, true}) {
    segments[1].source.data = is_remote ? &segments : nullptr;
    for (const bool scratch : {false, true}) {
      for (const bool fails : {false, true}) {
        for (const int arrivals : {1, 2}) {
          INFO("remote " << is_remote << ", scratch " << scratch << " with " << arrivals
                         << " arrivals, failed " << fails);
          const auto check = [&](Scheduling scheduling, Fetch fetch, bool expected) {
            CHECK(valid(scheduling, fetch, scratch, fails, arrivals) == expected);
          };
          check(Scheduling::kStatic, Fetch::kNone, !scratch && !fails && !is_remote);
          check(Scheduling::kDynamic, Fetch::kNone, scratch && !fails && !is_remote);
          check(Scheduling::kStatic, Fetch::kRemote, false);
          check(Scheduling::kDynamic, Fetch::kRemote, scratch && fails && arrivals == 2);
        }
      }
    }
  }
}
