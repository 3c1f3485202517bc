// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "catch.h"
#include "loopback.h"
#include "reference.h"
#include "ring/ring_forward.h"
#include "ring/step_recorder.h"
#include "testing/throttle.h"

using ringattn::Block;
using ringattn::Layout;
using ringattn::Partition;
using ringattn::plan_ring;
using ringattn::RingCall;
using ringattn::testing::LoopbackTransport;
using ringattn::testing::max_error;
using ringattn::testing::reference_attention;

namespace {

constexpr double kScale = 0.4;

at::Tensor shard(const at::Tensor& x, const Partition& partition, int64_t rank) {
  std::vector<at::Tensor> pieces = {x.narrow(1, 0, 0)};
  for (const auto& [begin, end] : partition.segments(rank)) {
    pieces.push_back(x.narrow(1, begin, end - begin));
  }
  return at::cat(pieces, 1);
}

void check_ring(const Partition& partition, const Partition& key_partition, bool causal,
                bool resident) {
  const auto options = at::TensorOptions(at::kDouble);
  const int64_t num_queries = partition.seq_len(), num_keys = key_partition.seq_len();
  const at::Tensor q = at::randn({2, num_queries, 4, 8}, options),
                   k = at::randn({2, num_keys, 2, 8}, options),
                   v = at::randn({2, num_keys, 2, 8}, options);
  const std::optional<int64_t> last = num_keys - num_queries;
  const auto [expected, expected_lse] =
      reference_attention(q, k, v, kScale, causal ? last : std::nullopt);

  std::vector<Block> blocks;
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    blocks.push_back({shard(k, key_partition, rank), shard(v, key_partition, rank)});
  }
  LoopbackTransport transport(blocks, resident);
  for (int64_t rank = 0; rank < partition.world_size(); ++rank) {
    const ringattn::RingPlan plan = plan_ring(partition, key_partition, rank, {causal});
    RingCall call{plan, kScale};
    if (resident) call.depth = partition.world_size();
    const auto [out, lse] = ringattn::ring_forward(shard(q, partition, rank), blocks[rank].k,
                                                   blocks[rank].v, call, &transport);
    INFO("rank " << rank << " of " << partition.world_size() << ", "
                 << ringattn::layout_name(partition.layout()) << (causal ? ", causal" : ""));
    CHECK(max_error(out, shard(expected, partition, rank)) < 1e-12);
    CHECK(max_error(lse.transpose(1, 2), shard(expected_lse.transpose(1, 2), partition, rank)) <
          1e-12);
  }
}

void check_ring(const Partition& partition, bool causal, bool resident = false) {
  check_ring(partition, partition, causal, resident);
}

// Where no block comes.
class FailingTransport : public ringattn::Transport {
 public:
  explicit FailingTransport(bool& closed) : closed_(closed) {}
  std::unique_ptr<ringattn::BlockStream> open(const ringattn::RingExchangePlan& exchange) override {
    return std::make_unique<Stream>(closed_);
  }

 private:
  struct Stream : ringattn::BlockStream {
    explicit Stream(bool& closed) : closed(closed) {}
    ~Stream() override { closed = true; }
    Block wait(int64_t step) override { throw std::runtime_error("it is gone"); }
    void release(int64_t step) override {}
    void finish(const std::vector<at::Tensor>& results) override {}
    double transfer_ms(int64_t step) override { return 0.0; }
    bool& closed;
  };
  bool& closed_;
};

}  // namespace

TEST_CASE("a ring over 1 to 5 ranks equals attention on one device") {
  const std::vector<std::vector<int64_t>> all_lengths = {
      {6},       {5, 5},       {7, 2},       {0, 9},         {3, 0, 8},
      {1, 1, 1}, {4, 9, 1, 2}, {0, 0, 5, 0}, {2, 3, 5, 7, 1}};
  for (const auto& lengths : all_lengths) {
    for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
      std::vector<int64_t> backwards;
      for (size_t rank = lengths.size(); rank-- > 0;) backwards.push_back(rank);
      for (const bool causal : {true, false}) {
        for (const bool resident : {false, true}) {
          check_ring(Partition(layout, lengths), causal, resident);
          check_ring(Partition(layout, lengths, backwards), causal, resident);
        }
      }
    }
  }
}

TEST_CASE("a ring of fewer queries than keys equals attention on one device") {
  const Partition keys(Layout::kZigzag, {9, 0, 6}, {2, 0, 1});
  for (const bool causal : {true, false}) {
    for (const bool resident : {false, true}) {
      check_ring(Partition(Layout::kZigzag, {2, 3, 2}), keys, causal, resident);
      check_ring(Partition(Layout::kContiguous, {0, 7, 0}), keys, causal, resident);
      check_ring(Partition({{{1, 3}}, {{0, 1}, {4, 5}}, {{3, 4}}}), keys, causal, resident);
      check_ring(Partition(Layout::kContiguous, {0, 0, 0}), keys, causal, resident);
      check_ring(Partition(Layout::kZigzag, {4}), Partition(Layout::kZigzag, {9}), causal, false);
    }
  }
}

TEST_CASE("a chunk after cached rows equals attention on one device") {
  // 10 cached rows, none of them on one rank; the chunk's 9 of zigzag {4, 2, 3} or contiguous.
  const Partition behind({{{0, 7}, {10, 12}, {17, 19}}, {{7, 10}, {12, 13}, {16, 17}}, {{13, 16}}}),
      pieces({{{3, 5}, {10, 14}}, {{0, 3}, {14, 16}}, {{5, 10}, {16, 19}}});
  for (const bool resident : {false, true}) {
    check_ring(Partition(Layout::kZigzag, {4, 2, 3}), behind, true, resident);
    check_ring(Partition(Layout::kContiguous, {4, 2, 3}), pieces, true, resident);
    check_ring(Partition(Layout::kZigzag, {4}), Partition(Layout::kZigzag, {9}), true, false);
  }
}

TEST_CASE("a slow rank repeats a share of a chunk, and its results stay") {
  const Partition keys({{{0, 7}, {10, 12}, {16, 18}}, {{7, 10}, {12, 16}}});
  ringattn::set_slowdown(2.6);
  check_ring(Partition(Layout::kZigzag, {4, 4}), keys, true, false);
  ringattn::set_slowdown(1.0);
}

TEST_CASE("blocks that are resident are attended in two launches, the own one and all others") {
  const Partition partition(Layout::kContiguous, {4, 4, 4});
  auto& recorder = ringattn::Recorder::get();
  for (const bool by_block : {false, true}) {
    recorder.start(by_block);
    check_ring(partition, false, /*resident=*/true);
    const auto steps = recorder.stop();
    REQUIRE(steps.size() == (by_block ? 9 : 6));  // of three ranks
    CHECK(steps[1].flops == (by_block ? 1 : 2) * steps[0].flops);
  }
}

TEST_CASE("more segments than a launch takes are attended block by block") {
  // Of zigzag chunks after cached rows, the outermost rank has two segments of each other block.
  const int64_t most = ringattn::PeerSignals::kMaxPeers;
  for (const int64_t world_size : {8, 9}) {
    const Partition queries(Layout::kZigzag, std::vector<int64_t>(world_size, 2));
    std::vector<std::vector<ringattn::Segment>> pieces;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      auto& rows = pieces.emplace_back();
      rows.push_back({2 * rank, 2 * rank + 2});
      for (const auto& [begin, end] : queries.segments(rank)) {
        rows.push_back({2 * world_size + begin, 2 * world_size + end});
      }
    }
    auto& recorder = ringattn::Recorder::get();
    recorder.start(false);
    check_ring(queries, Partition(pieces), true, /*resident=*/true);
    const auto steps = recorder.stop();
    const int64_t split = 2 * world_size - 1 > most ? world_size - 2 : 0;  // launches more
    CHECK(steps.size() == static_cast<size_t>(2 * world_size + split));
  }
}

TEST_CASE("timings have one step for every block, and none while recording is off") {
  const Partition partition(Layout::kContiguous, {4, 4});
  auto& recorder = ringattn::Recorder::get();
  recorder.start(true);
  check_ring(partition, true);
  const auto steps = recorder.stop();
  check_ring(partition, true);
  REQUIRE(steps.size() == 4);  // two ranks, two blocks each
  CHECK(steps[0].own);
  CHECK(steps[1].source == 1);
  CHECK(steps[1].attention_ms == 0.0);  // rank 0 sees nothing of rank 1
  CHECK(steps[3].attention_ms > 0.0);
  CHECK(steps[3].call == 1);
  recorder.start(true);
  CHECK(recorder.stop().empty());
}

TEST_CASE("a call that fails leaves no timings, and nothing of its stream") {
  const Partition partition(Layout::kContiguous, {4, 4});
  const at::Tensor x = at::zeros({1, 4, 1, 8});
  bool closed = false;
  FailingTransport transport(closed);
  auto& recorder = ringattn::Recorder::get();
  recorder.start(true);
  CHECK_THROWS_AS(
      ringattn::ring_forward(
          x, x, x, RingCall{plan_ring(partition, partition, 1, {/*causal=*/true}), kScale},
          &transport),
      std::runtime_error);
  CHECK(closed);
  CHECK(recorder.stop().empty());
}

TEST_CASE("a slowed rank computes the same") {
  ringattn::set_slowdown(2.5);
  check_ring(Partition(Layout::kZigzag, {5, 3, 8}), true);
  ringattn::set_slowdown(1.0);
}
