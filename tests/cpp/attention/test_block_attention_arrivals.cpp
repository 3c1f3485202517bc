// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "meanwhile.h"
#include "segment_lists.h"

// What a launch does with its words: tiles handed out one by one, keys that it brings while it
// runs.

using ringattn::LaunchWords;
using ringattn::testing::attend_list;
using ringattn::testing::brings_much;
using ringattn::testing::can_run;
using ringattn::testing::Dim;
using ringattn::testing::Ends;
using ringattn::testing::Heads;
using ringattn::testing::kAll;
using ringattn::testing::kDims;
using ringattn::testing::kLongZigzag;
using ringattn::testing::kNaN;
using ringattn::testing::kOddZigzag;
using ringattn::testing::kZigzag;
using ringattn::testing::Launch;
using ringattn::testing::Meanwhile;
using ringattn::testing::no_words;
using ringattn::testing::pairs_row_tiles;
using ringattn::testing::Problem;
using ringattn::testing::Results;
using ringattn::testing::same_bits;
using ringattn::testing::Segment;
using ringattn::testing::Shape;

namespace {

/// Has keys and values of all segments but the first brought, into memory that holds NaN, from
/// where more rows lie than are asked for, NaN as well.
class Remote {
 public:
  explicit Remote(Problem& problem) {
    for (size_t i = 1; i < problem.segments.size(); ++i) {
      Segment& segment = problem.segments[i];
      // [H_kv, 2, B, S_k, D]
      const at::Tensor planes = at::stack({segment.k, segment.v}).permute({3, 0, 1, 2, 4});
      segment.source = at::constant_pad_nd(planes, {0, 0, 0, 5}, kNaN).contiguous();
      sources_.push_back(segment.source);
      to_.push_back(at::empty_like(planes, planes.options(), at::MemoryFormat::Contiguous));
      segment.k = to_.back().select(1, 0).permute({1, 2, 0, 3});
      segment.v = to_.back().select(1, 1).permute({1, 2, 0, 3});
    }
  }

  void forget() const {
    for (const at::Tensor& to : to_) to.fill_(kNaN);
  }
  /// NaN in place of a head of all sources, and what was there, in memory of the host: from there a
  /// copy engine brings it back while a launch holds every multiprocessor.
  std::vector<at::Tensor> take_away(int64_t head) const {
    std::vector<at::Tensor> taken;
    for (const at::Tensor& source : sources_) {
      taken.push_back(source[head].cpu());
      source[head].fill_(kNaN);
    }
    return taken;
  }
  void give_back(int64_t head, const std::vector<at::Tensor>& taken,
                 const Meanwhile& meanwhile) const {
    for (size_t i = 0; i < taken.size(); ++i) meanwhile.copy(sources_[i][head], taken[i]);
  }

  bool nothing_came() const {
    return std::all_of(to_.begin(), to_.end(),
                       [](const at::Tensor& to) { return to.isnan().all().item<bool>(); });
  }

 private:
  std::vector<at::Tensor> sources_, to_;
};

/// What to attend: keys of two heads for each KV head, or of an odd number of them, with which
/// thread blocks share keys as row tiles.
struct Case {
  std::vector<Shape> shapes;
  int64_t num_queries;
  Heads heads;
};

/// A launch of thread blocks alone, all keys being there.
Launch alone() {
  Launch launch;
  launch.max_blocks = 7;
  return launch;
}

/// As another call begins: the peers have staged everything, and nobody has been told that it has
/// been read.
void stage_again(const Problem& problem, const Launch& launch) {
  launch.notices[0].fill_(static_cast<int>(ringattn::staged_heads(problem.heads().kv)));
  launch.notices[4].fill_(77);  // a kind of call
  for (const int told : {1, 5}) launch.notices[told].fill_(0);
}

/// A launch that brings keys, of as many peers.
Launch bringing(const Problem& problem, int64_t num_peers, int64_t room) {
  Launch launch;
  launch.words = no_words(room);
  launch.failed = at::zeros({1}, launch.words.options());
  launch.given_up = at::zeros({1}, at::TensorOptions(at::kInt).pinned_memory(true));
  launch.notices = at::zeros({6, num_peers}, launch.words.options());
  launch.notices[2].fill_(1);
  stage_again(problem, launch);
  return launch;
}

void give_up(const Launch& launch, Ends ends, const Meanwhile& meanwhile) {
  if (ends == Ends::kFailed) meanwhile.write(launch.failed, 1);
  if (ends == Ends::kGivenUp) launch.given_up.fill_(1);
}

/// What is left when it is over: words as they were, the others told.
bool has_told(const Launch& launch) {
  const auto all_are = [&](int notice, int value) {
    return launch.notices[notice].eq(value).all().item<bool>();
  };
  return launch.words.eq(0).all().item<bool>() && all_are(0, 0) && all_are(1, 1) && all_are(4, 0) &&
         all_are(5, 1) && launch.notices[3][0].item<int>() == 5;
}

}  // namespace

TEST_CASE("tiles handed out one by one give the same bits, launch after launch") {
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
      launch.words = no_words();
      for (int repeat = 0; repeat < 20; ++repeat) {
        Results results(problem);
        REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
        REQUIRE(same_bits(results.state, shared_out.state));
        REQUIRE(same_bits(results.lse, shared_out.lse));
        REQUIRE(launch.words.eq(0).all().item<bool>());
      }
    }
  }
}

TEST_CASE("keys that a launch brings, late ones too, are waited for, and the words are set back") {
  if (!can_run()) return;
  const std::vector<Case> cases = {{kZigzag, 300, {}},
                                   {kLongZigzag, 300, {}},
                                   {kLongZigzag, 700, {3, 3}},
                                   {kOddZigzag, 1338, {6, 2}}};
  for (const Dim& dim : kDims) {
    for (const auto& [shapes, num_queries, heads] : cases) {
      for (const int32_t max_blocks : {2, 1000}) {
        Problem problem(num_queries, shapes, dim, at::kBFloat16, heads);
        Results there(problem);
        REQUIRE(attend_list(problem, alone(), there) == cudaSuccess);
        const Remote remote(problem);
        const bool odd = heads.query / heads.kv % 2 != 0;
        if (dim.tile_rows != 192) REQUIRE(pairs_row_tiles(problem) == odd);
        for (const int64_t slices : {1, 2, 4}) {
          Launch launch = bringing(problem, 3, slices * static_cast<int64_t>(shapes.size()));
          launch.max_blocks = max_blocks;
          for (const uint32_t lateness : {0, 0, 1, 2, 3}) {
            INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows << ", " << heads.query
                      << " heads, " << max_blocks << " blocks, late " << lateness);
            Results results(problem);
            remote.forget();
            stage_again(problem, launch);
            launch.lateness = lateness;
            REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
            REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
            REQUIRE(same_bits(results.state, there.state));
            REQUIRE(same_bits(results.lse, there.lse));
            REQUIRE(has_told(launch));
          }
        }
      }
    }
  }
}

TEST_CASE("large blocks, of many pieces, are brought whole") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    const std::vector<Shape> shapes = {{2300, 0, 0}, {2100, kAll, 1024}, {1111, kAll, 0}};
    Problem problem(2300, shapes, dim, at::kHalf, dim.head_dim == 128 ? Heads{3, 3} : Heads{});
    Results there(problem);
    REQUIRE(attend_list(problem, alone(), there) == cudaSuccess);
    const Remote remote(problem);
    const Launch launch = bringing(problem, 2, 4096);
    for (int repeat = 0; repeat < 10; ++repeat) {
      Results results(problem);
      remote.forget();
      stage_again(problem, launch);
      REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
      REQUIRE(same_bits(results.state, there.state));
      REQUIRE(same_bits(results.lse, there.lse));
      REQUIRE(has_told(launch));
    }
  }
}

TEST_CASE("much is brought in large parcels, little in small ones, and comes whole") {
  if (!can_run()) return;
  struct Case {
    int64_t num_queries;
    std::vector<Shape> shapes;
    bool much;
  };
  const std::vector<Case> cases = {
      {300, kZigzag, true}, {2300, {{2300, 0, 0}, {2100, kAll, 1024}, {1111, kAll, 0}}, false}};
  for (const Dim& dim : {Dim(128, 128), Dim(128, 192)}) {
    for (const auto& [num_queries, shapes, much] : cases) {
      Problem problem(num_queries, shapes, dim, at::kBFloat16);
      const int64_t last = shapes.front().num_keys;
      Launch launch;
      launch.with_state = false;
      launch.final_end = last;
      Results there(problem);
      REQUIRE(attend_list(problem, launch, there) == cudaSuccess);
      const Remote remote(problem);
      REQUIRE(brings_much(problem) == much);
      launch = bringing(problem, 2, 4096);
      launch.with_state = false;
      launch.final_end = last;
      for (const uint32_t lateness : {0, 1, 2, 3}) {
        Results results(problem);
        remote.forget();
        stage_again(problem, launch);
        launch.lateness = lateness;
        REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
        REQUIRE(same_bits(results.out, there.out));
        REQUIRE(same_bits(results.lse, there.lse));
        REQUIRE(has_told(launch));
      }
    }
  }
}

TEST_CASE("a launch without anything to bring tells the others all the same") {
  if (!can_run()) return;
  const Problem problem(300, {{300, 0, 0}}, 128, at::kBFloat16);
  Results results(problem);
  const Launch launch = bringing(problem, 3, 16);
  REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
  CHECK(has_told(launch));
}

TEST_CASE("a launch that brings keys ends when the others have read what is here, or is given up") {
  if (!can_run()) return;
  Problem problem(300, kZigzag, 128, at::kBFloat16);
  const Remote remote(problem);
  Results results(problem);
  const Meanwhile meanwhile;
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    const Launch launch = bringing(problem, 3, 64);
    launch.notices[2][1].fill_(0);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(meanwhile.ends_soon());
    CHECK(meanwhile.read(launch.notices[3]) == 7);
    if (ends == Ends::kByItself) meanwhile.write(launch.notices[2][1], 1);
    give_up(launch, ends, meanwhile);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(has_told(launch));
    CHECK((launch.failed.item<int>() == 1) == (ends != Ends::kByItself));
  }
}

TEST_CASE("heads that a peer has yet to stage are not read, and waited for until they are staged") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    Problem problem(700, kLongZigzag, dim, at::kBFloat16, {3, 3});
    Results there(problem);
    REQUIRE(attend_list(problem, alone(), there) == cudaSuccess);
    const Remote remote(problem);
    const Meanwhile meanwhile;
    for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
      INFO("D " << dim.head_dim << " in tiles of " << dim.tile_rows);
      const bool gives_up = ends != Ends::kByItself;
      const Launch launch = bringing(problem, 3, 64);
      launch.notices[0][1].fill_(static_cast<int>(ringattn::kBeingStaged));
      Results results(problem);
      remote.forget();
      const std::vector<at::Tensor> last_heads = remote.take_away(2);
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
      CHECK_FALSE(meanwhile.ends_soon());
      CHECK(meanwhile.read(launch.notices[3]) == 6);
      CHECK(meanwhile.read(launch.notices[1][0]) == 0);  // nobody has been told that all is read
      if (gives_up) {
        give_up(launch, ends, meanwhile);
      } else {
        // Two of three heads: what is left is waited for all the same.
        meanwhile.write(launch.notices[0][1], ringattn::staged_heads(2));
        CHECK_FALSE(meanwhile.ends_soon());
        CHECK(meanwhile.read(launch.notices[1][0]) == 0);
        remote.give_back(2, last_heads, meanwhile);
        meanwhile.write(launch.notices[0][1], ringattn::staged_heads(3));
      }
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      CHECK(has_told(launch));
      if (gives_up) {
        CHECK(remote.nothing_came());
      } else {
        CHECK(same_bits(results.state, there.state));
        CHECK(same_bits(results.lse, there.lse));
      }
      remote.give_back(2, last_heads, meanwhile);
    }
  }
}

TEST_CASE("words are taken back only when every peer has staged everything, read or not") {
  if (!can_run()) return;
  const Problem problem(300, {{300, 0, 0}}, 128, at::kBFloat16);  // nothing to bring
  Results results(problem);
  const Meanwhile meanwhile;
  const Launch launch = bringing(problem, 3, 16);
  launch.notices[0][2].fill_(static_cast<int>(ringattn::kBeingStaged));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
  CHECK_FALSE(meanwhile.ends_soon());
  const int all = meanwhile.read(launch.notices[0][0]);
  CHECK(all != 0);
  CHECK(meanwhile.read(launch.notices[1][0]) == 0);
  meanwhile.write(launch.notices[0][2], all);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(has_told(launch));
}

TEST_CASE("what streams are told is waited for before it is taken back, or the host gives up") {
  if (!can_run()) return;
  const Problem problem(300, {{300, 0, 0}}, 128, at::kBFloat16);
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    Results results(problem);
    const Meanwhile meanwhile;
    const Launch launch = bringing(problem, 3, 16);
    launch.notices[4][1].fill_(0);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(meanwhile.ends_soon());
    CHECK(meanwhile.read(launch.notices[3]) == 8);
    CHECK(meanwhile.read(launch.notices[4][0]) == 77);
    for (const int told : {1, 5}) CHECK(meanwhile.read(launch.notices[told][2]) == 0);
    if (ends == Ends::kByItself) meanwhile.write(launch.notices[4][1], 77);
    give_up(launch, ends, meanwhile);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(has_told(launch));
  }
}

TEST_CASE("a launch that has been given up reads nothing and leaves NaN") {
  if (!can_run()) return;
  for (const Dim& dim : kDims) {
    const auto& shapes = dim.head_dim == 128 ? kLongZigzag : kZigzag;
    Problem problem(300, shapes, dim, at::kBFloat16);
    const Remote remote(problem);
    remote.forget();
    Launch launch = bringing(problem, 3, 64);
    launch.final_end = 300;
    launch.failed.fill_(1);
    Results results(problem);
    results.out.zero_();
    results.lse.zero_();
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK(results.out.isnan().all().item<bool>());
    CHECK(results.lse.isnan().all().item<bool>());
    CHECK(remote.nothing_came());
    CHECK(has_told(launch));
    launch.failed.zero_();
    stage_again(problem, launch);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(results.out.isnan().any().item<bool>());
  }
}
