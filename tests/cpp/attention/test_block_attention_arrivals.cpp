// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "remote_segments.h"
#include "segment_lists.h"
#include "side_stream.h"

// What a launch does with its scratch: work tiles dispatched one by one, keys fetched while it
// runs.

using ringattn::LaunchScratch;
using ringattn::testing::attend_list;
using ringattn::testing::can_run;
using ringattn::testing::Dim;
using ringattn::testing::Ends;
using ringattn::testing::fetching_launch;
using ringattn::testing::Heads;
using ringattn::testing::is_fetch_bound;
using ringattn::testing::kAll;
using ringattn::testing::kChunk;
using ringattn::testing::kDims;
using ringattn::testing::kLongZigzag;
using ringattn::testing::kNaN;
using ringattn::testing::kNumSignals;
using ringattn::testing::kOddZigzag;
using ringattn::testing::kPhase;
using ringattn::testing::kReadByPeer;
using ringattn::testing::kReadByThisRank;
using ringattn::testing::kReadMirrorByThisRank;
using ringattn::testing::kStaged;
using ringattn::testing::kStagedMirrorByPeer;
using ringattn::testing::kZigzag;
using ringattn::testing::Launch;
using ringattn::testing::pairs_row_tiles;
using ringattn::testing::Problem;
using ringattn::testing::Remote;
using ringattn::testing::Results;
using ringattn::testing::same_bits;
using ringattn::testing::Segment;
using ringattn::testing::Shape;
using ringattn::testing::SideStream;
using ringattn::testing::stage_again;
using ringattn::testing::zero_scratch;

namespace {

/// What to attend: keys of two heads for each KV head, or of an odd number of them, with which
/// thread blocks share keys as row tiles.
struct Case {
  std::vector<Shape> shapes;
  int64_t num_queries;
  Heads heads;
};

/// A launch of unpaired thread blocks, with all keys local.
Launch alone() {
  Launch launch;
  launch.max_blocks = 7;
  return launch;
}

void give_up(const Launch& launch, Ends ends, const SideStream& side) {
  if (ends == Ends::kFailed) side.write(launch.failed, 1);
  if (ends == Ends::kGivenUp) launch.given_up.fill_(1);
}

/// At the end: scratch is 0 again, the peers are signalled.
bool has_signalled(const Launch& launch) {
  const auto all_are = [&](int signal, int value) {
    return launch.signals[signal].eq(value).all().item<bool>();
  };
  return launch.scratch.eq(0).all().item<bool>() && all_are(kStaged, 0) &&
         all_are(kReadByThisRank, 1) && all_are(kStagedMirrorByPeer, 0) &&
         all_are(kReadMirrorByThisRank, 1) && launch.signals[kPhase][0].item<int>() == 5;
}

}  // namespace

TEST_CASE("work tiles dispatched one by one give the same bits, launch after launch") {
  if (!can_run()) return;
  const std::vector<Case> cases = {{{{300, 0, 0}}, 300, {}},
                                   {kZigzag, 300, {}},
                                   {kLongZigzag, 300, {}},
                                   {kLongZigzag, 300, {3, 3}},
                                   {kOddZigzag, 1338, {6, 2}}};
  for (const Dim& dim : {Dim(128, 128), Dim(128, 192)}) {
    for (const auto& [shapes, num_queries, heads] : cases) {
      const Problem problem(num_queries, shapes, dim, at::kBFloat16, heads);
      Results shared_out(problem);
      REQUIRE(attend_list(problem, {}, shared_out) == cudaSuccess);
      Launch launch;
      launch.scratch = zero_scratch();
      for (int repeat = 0; repeat < 20; ++repeat) {
        Results results(problem);
        REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
        REQUIRE(same_bits(results.state, shared_out.state));
        REQUIRE(same_bits(results.lse, shared_out.lse));
        REQUIRE(launch.scratch.eq(0).all().item<bool>());
      }
    }
  }
}

TEST_CASE("fetched keys, delayed ones too, are waited for, and scratch is 0 again") {
  if (!can_run()) return;
  const std::vector<Case> cases = {{kZigzag, 300, {}},
                                   {kLongZigzag, 300, {}},
                                   {kLongZigzag, 700, {3, 3}},
                                   {kOddZigzag, 1338, {6, 2}},
                                   {kChunk, 300, {}}};
  for (const Dim& dim : kDims) {
    for (const auto& [shapes, num_queries, heads] : cases) {
      for (const int32_t max_blocks : {2, 1000}) {
        Problem problem(num_queries, shapes, dim, at::kBFloat16, heads);
        Results there(problem);
        REQUIRE(attend_list(problem, alone(), there) == cudaSuccess);
        const Remote remote(problem);
        const bool odd = heads.query / heads.kv % 2 != 0;
        if (dim.tile_rows != 192) REQUIRE(pairs_row_tiles(problem) == odd);
        for (const int64_t groups : {1, 2, 4}) {
          Launch launch = fetching_launch(problem, 3, groups * static_cast<int64_t>(shapes.size()));
          launch.max_blocks = max_blocks;
          for (const uint32_t delay_seed : {0, 0, 1, 2, 3}) {
            INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows << ", " << heads.query
                      << " heads, " << max_blocks << " blocks, late " << delay_seed);
            Results results(problem);
            remote.forget();
            stage_again(problem, launch);
            launch.delay_seed = delay_seed;
            REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
            REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
            REQUIRE(same_bits(results.state, there.state));
            REQUIRE(same_bits(results.lse, there.lse));
            REQUIRE(has_signalled(launch));
          }
        }
      }
    }
  }
}

TEST_CASE("large blocks, of many chunks, are fetched whole") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    const std::vector<Shape> shapes = {{2300, 0, 0}, {2100, kAll, 1024}, {1111, kAll, 0}};
    Problem problem(2300, shapes, dim, at::kHalf, dim.head_dim == 128 ? Heads{3, 3} : Heads{});
    Results there(problem);
    REQUIRE(attend_list(problem, alone(), there) == cudaSuccess);
    const Remote remote(problem);
    const Launch launch = fetching_launch(problem, 2, 4096);
    for (int repeat = 0; repeat < 10; ++repeat) {
      Results results(problem);
      remote.forget();
      stage_again(problem, launch);
      REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
      REQUIRE(same_bits(results.state, there.state));
      REQUIRE(same_bits(results.lse, there.lse));
      REQUIRE(has_signalled(launch));
    }
  }
}

TEST_CASE("fetch-bound and other calls, with large and small fetch buffers, fetch whole blocks") {
  if (!can_run()) return;
  struct Case {
    int64_t num_queries;
    std::vector<Shape> shapes;
    bool fetch_bound;
  };
  const std::vector<Case> cases = {
      {300, kZigzag, true}, {2300, {{2300, 0, 0}, {2100, kAll, 1024}, {1111, kAll, 0}}, false}};
  for (const Dim& dim : {Dim(128, 128), Dim(128, 192)}) {
    for (const auto& [num_queries, shapes, fetch_bound] : cases) {
      Problem problem(num_queries, shapes, dim, at::kBFloat16);
      const int64_t last = shapes.front().num_keys;
      Launch launch;
      launch.with_state = false;
      launch.final_end = last;
      Results there(problem);
      REQUIRE(attend_list(problem, launch, there) == cudaSuccess);
      const Remote remote(problem);
      REQUIRE(is_fetch_bound(problem) == fetch_bound);
      launch = fetching_launch(problem, 2, 4096);
      launch.with_state = false;
      launch.final_end = last;
      for (const uint32_t delay_seed : {0, 1, 2, 3}) {
        Results results(problem);
        remote.forget();
        stage_again(problem, launch);
        launch.delay_seed = delay_seed;
        REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
        REQUIRE(same_bits(results.out, there.out));
        REQUIRE(same_bits(results.lse, there.lse));
        REQUIRE(has_signalled(launch));
      }
    }
  }
}

TEST_CASE("a launch with nothing to fetch signals its peers all the same") {
  if (!can_run()) return;
  const Problem problem(300, {{300, 0, 0}}, 128, at::kBFloat16);
  Results results(problem);
  const Launch launch = fetching_launch(problem, 3, 16);
  REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
  CHECK(has_signalled(launch));
}

TEST_CASE("a fetching launch ends when its peers have read, or the call has failed") {
  if (!can_run()) return;
  Problem problem(300, kZigzag, 128, at::kBFloat16);
  const Remote remote(problem);
  Results results(problem);
  const SideStream side;
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    const Launch launch = fetching_launch(problem, 3, 64);
    launch.signals[kReadByPeer][1].fill_(0);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(side.ends_soon());
    CHECK(side.read(launch.signals[kPhase]) == 7);
    if (ends == Ends::kByItself) side.write(launch.signals[kReadByPeer][1], 1);
    give_up(launch, ends, side);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(has_signalled(launch));
    CHECK((launch.failed.item<int>() == 1) == (ends != Ends::kByItself));
  }
}

TEST_CASE("heads that a peer has yet to stage are not read before they are staged") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    Problem problem(700, kLongZigzag, dim, at::kBFloat16, {3, 3});
    Results there(problem);
    REQUIRE(attend_list(problem, alone(), there) == cudaSuccess);
    const Remote remote(problem);
    const SideStream side;
    for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
      INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows);
      const bool gives_up = ends != Ends::kByItself;
      const Launch launch = fetching_launch(problem, 3, 64);
      launch.signals[kStaged][1].fill_(static_cast<int>(ringattn::kBeingStaged));
      Results results(problem);
      remote.forget();
      const std::vector<at::Tensor> last_heads = remote.take_away(2);
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
      CHECK_FALSE(side.ends_soon());
      CHECK(side.read(launch.signals[kPhase]) == 6);
      CHECK(side.read(launch.signals[kReadByThisRank][0]) ==
            0);  // not signalled before everything is read
      if (gives_up) {
        give_up(launch, ends, side);
      } else {
        // Two of three heads: what is left is waited for all the same.
        side.write(launch.signals[kStaged][1], ringattn::staged_heads(2));
        CHECK_FALSE(side.ends_soon());
        CHECK(side.read(launch.signals[kReadByThisRank][0]) == 0);
        remote.give_back(2, last_heads, side);
        side.write(launch.signals[kStaged][1], ringattn::staged_heads(3));
      }
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      CHECK(has_signalled(launch));
      if (gives_up) {
        CHECK(remote.nothing_arrived());
      } else {
        CHECK(same_bits(results.state, there.state));
        CHECK(same_bits(results.lse, there.lse));
      }
      remote.give_back(2, last_heads, side);
    }
  }
}

TEST_CASE("signals are cleared only when every peer has staged everything, read or not") {
  if (!can_run()) return;
  const Problem problem(300, {{300, 0, 0}}, 128, at::kBFloat16);  // nothing to fetch
  Results results(problem);
  const SideStream side;
  const Launch launch = fetching_launch(problem, 3, 16);
  launch.signals[kStaged][2].fill_(static_cast<int>(ringattn::kBeingStaged));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
  CHECK_FALSE(side.ends_soon());
  const int all = side.read(launch.signals[kStaged][0]);
  CHECK(all != 0);
  CHECK(side.read(launch.signals[kReadByThisRank][0]) == 0);
  side.write(launch.signals[kStaged][2], all);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(has_signalled(launch));
}

TEST_CASE("mirrors are waited for before they are cleared, or the host gives up") {
  if (!can_run()) return;
  const Problem problem(300, {{300, 0, 0}}, 128, at::kBFloat16);
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    Results results(problem);
    const SideStream side;
    const Launch launch = fetching_launch(problem, 3, 16);
    launch.signals[kStagedMirrorByPeer][1].fill_(0);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(side.ends_soon());
    CHECK(side.read(launch.signals[kPhase]) == 8);
    CHECK(side.read(launch.signals[kStagedMirrorByPeer][0]) == 77);
    for (const int read : {kReadByThisRank, kReadMirrorByThisRank})
      CHECK(side.read(launch.signals[read][2]) == 0);
    if (ends == Ends::kByItself) side.write(launch.signals[kStagedMirrorByPeer][1], 77);
    give_up(launch, ends, side);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(has_signalled(launch));
  }
}

TEST_CASE("a launch after a failure fetches nothing and leaves NaN") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    const auto& shapes = dim.head_dim == 128 ? kLongZigzag : kZigzag;
    Problem problem(300, shapes, dim, at::kBFloat16);
    const Remote remote(problem);
    remote.forget();
    Launch launch = fetching_launch(problem, 3, 64);
    launch.final_end = 300;
    launch.failed.fill_(1);
    Results results(problem);
    results.out.zero_();
    results.lse.zero_();
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK(results.out.isnan().all().item<bool>());
    CHECK(results.lse.isnan().all().item<bool>());
    CHECK(remote.nothing_arrived());
    CHECK(has_signalled(launch));
    launch.failed.zero_();
    stage_again(problem, launch);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(results.out.isnan().any().item<bool>());
  }
}
