// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <limits>
#include <vector>

#include "catch.h"
#include "device.h"
#include "peer_sync/protocol.h"
#include "side_stream.h"
#include "stage_signals.h"
#include "transport/symmetric/kernels/stage.h"

// One device: its own pad stands for those of its peers.

using ringattn::kBeingStaged;
using ringattn::kCallMismatch;
using ringattn::staged_heads;
using ringattn::cuda::kVectorBytes;
using ringattn::cuda::StageParams;
using ringattn::cuda::StageSource;
using ringattn::testing::all_are;
using ringattn::testing::Ends;
using ringattn::testing::kTag;
using ringattn::testing::Pad;
using ringattn::testing::SideStream;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Shape {
  int64_t batch, rows, heads, head_dim;
  int64_t staged_rows;  // `rows` or more
};

StageSource source_of(const at::Tensor& x) {  // [B, S, H, D]
  const auto bytes = [&](int64_t dim) { return x.stride(dim) * x.element_size(); };
  return {x.const_data_ptr(), bytes(0), bytes(1), bytes(2)};
}

/// k and v of a call, a part of larger tensors, and where they are staged, NaN as yet.
struct Block {
  Shape shape;
  at::Tensor k, v;
  at::Tensor staged;  // [H, 2, B, staged_rows, D]

  explicit Block(const Shape& of) : shape(of) {
    const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
    // Of one tensor, with heads beside each other, as a projection of all three leaves them.
    const at::Tensor qkv = at::randn({of.batch, of.rows, 3 * of.heads + 1, of.head_dim}, options);
    k = qkv.narrow(2, of.heads, of.heads);
    v = qkv.narrow(2, 2 * of.heads, of.heads);
    staged = at::full({of.heads, 2, of.batch, of.staged_rows, of.head_dim}, kNaN, options);
  }

  StageParams params(bool kernel_fetches) const {
    StageParams params;
    params.k = source_of(k);
    params.v = source_of(v);
    params.staged = staged.data_ptr();
    params.batch = static_cast<int>(shape.batch);
    params.rows = static_cast<int>(shape.rows);
    params.staged_rows = static_cast<int>(shape.staged_rows);
    params.num_kv_heads = static_cast<int>(shape.heads);
    params.row_bytes = shape.head_dim * 2;
    params.kernel_fetches = params.follows_closely = kernel_fetches;
    return params;
  }

  bool is_staged() const {
    const at::Tensor expected = at::stack({k, v}).permute({3, 0, 1, 2, 4});
    return at::equal(staged.narrow(3, 0, shape.rows), expected) &&
           staged.narrow(3, shape.rows, shape.staged_rows - shape.rows).isnan().all().item<bool>();
  }
};

const std::vector<Shape> kShapes = {
    {1, 1, 1, 8, 1},         {1, 300, 3, 64, 300}, {2, 257, 5, 72, 300}, {3, 100, 2, 128, 101},
    {1, 1000, 9, 256, 1000}, {1, 33, 33, 200, 40}, {1, 0, 4, 64, 10},    {2, 4096, 32, 128, 4096},
};

}  // namespace

TEST_CASE("a block is staged whole, its heads are signalled, and counters are 0 again") {
  if (!has_device()) return;
  for (const Shape& shape : kShapes) {
    for (const bool kernel_fetches : {false, true}) {
      INFO("B " << shape.batch << " S " << shape.rows << " H " << shape.heads << " D "
                << shape.head_dim << ", a kernel fetches: " << kernel_fetches);
      const Block block(shape);
      const Pad pad;
      for (int call = 1; call <= 3; ++call) {
        block.staged.fill_(kNaN);
        pad.staged_by_this_rank.zero_();
        pad.read_by_peer.fill_(1);
        pad.staged_mirror_by_this_rank.zero_();
        pad.read_mirror_by_peer.fill_(1);
        pad.staged_by_peer.fill_(1);
        StageParams params = block.params(kernel_fetches);
        pad.add_to(params);
        params.delay_seed = call == 3 ? 77 : 0;
        REQUIRE(ringattn::cuda::stage(params, nullptr) == cudaSuccess);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        CHECK(block.is_staged());
        CHECK(all_are(pad.staged_by_this_rank, staged_heads(shape.heads)));
        CHECK(all_are(pad.staged_mirror_by_this_rank, kTag));
        CHECK(all_are(pad.read_mirror_by_peer, 0));
        CHECK(all_are(pad.read_by_peer, 0));
        CHECK(all_are(pad.counters, 0));
        CHECK(pad.others[2].item<int>() == call);
        CHECK(pad.others[3].item<int>() == 9);
      }
    }
  }
}

TEST_CASE("a message is staged as one row of bytes") {
  if (!has_device()) return;
  for (const int64_t bytes : {1, 16, 1000, 5 << 20}) {
    const auto options = at::TensorOptions(at::kCUDA).dtype(at::kByte);
    const int64_t whole = (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    const at::Tensor message = at::randint(256, {whole}, options), to = at::zeros({whole}, options);
    const Pad pad;
    StageParams params;
    params.k.data = message.data_ptr();
    params.keys_only = true;
    params.rows = params.staged_rows = 1;
    params.row_bytes = bytes;
    params.staged = to.data_ptr();
    pad.add_to(params);
    REQUIRE(ringattn::cuda::stage(params, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(at::equal(to.narrow(0, 0, bytes), message.narrow(0, 0, bytes)));
    CHECK(all_are(pad.staged_by_this_rank, staged_heads(1)));
    CHECK(all_are(pad.staged_mirror_by_this_rank, kTag));
  }
}

TEST_CASE("everything is staged and signalled before peers begin; the kernel waits for them") {
  if (!has_device()) return;
  const SideStream side;
  const Block block({1, 1000, 9, 128, 1000});
  const at::Tensor given_up = at::zeros({1}, at::TensorOptions(at::kInt).pinned_memory(true));
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    block.staged.fill_(kNaN);
    const Pad pad;
    pad.staged_by_peer.fill_(static_cast<int>(kBeingStaged));
    pad.staged_by_peer[1].zero_();
    StageParams params = block.params(/*kernel_fetches=*/true);
    pad.add_to(params);
    params.given_up = reinterpret_cast<const uint32_t*>(given_up.data_ptr<int>());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(ringattn::cuda::stage(params, nullptr) == cudaSuccess);
    CHECK_FALSE(side.ends_soon());
    CHECK(side.read(pad.staged_by_this_rank) == static_cast<int>(staged_heads(9)));
    if (ends == Ends::kByItself) side.write(pad.staged_by_peer[1], 1);
    if (ends == Ends::kFailed) side.write(pad.others[0], 1);
    if (ends == Ends::kGivenUp) given_up.fill_(1);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(block.is_staged());
    CHECK((pad.others[0].item<int>() == 1) == (ends != Ends::kByItself));
  }
}

TEST_CASE("a peer in another call is detected by the kernel that waits for it") {
  if (!has_device()) return;
  for (const bool kernel_fetches : {true, false}) {
    const Pad pad;
    pad.staged_by_peer.fill_(static_cast<int>(kBeingStaged));
    pad.tag_by_peer[1].fill_(kTag + 1);
    const Block block({1, 300, 3, 64, 300});
    StageParams params = block.params(kernel_fetches);
    pad.add_to(params);
    REQUIRE(ringattn::cuda::stage(params, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(all_are(pad.staged_by_this_rank, staged_heads(3)));
    CHECK(pad.others[0].item<int>() == (kernel_fetches ? static_cast<int>(kCallMismatch) : 0));
    CHECK(pad.others[4].item<int>() == (kernel_fetches ? 2 : 0));
    if (!kernel_fetches) CHECK(all_are(pad.tag_by_this_rank, kTag));
  }
}

TEST_CASE("a rank that has given up stages nothing and signals nothing") {
  if (!has_device()) return;
  const Block block({1, 1000, 9, 128, 1000});
  const Pad pad;
  pad.others[0].fill_(1);
  StageParams params = block.params(/*kernel_fetches=*/true);
  pad.add_to(params);
  REQUIRE(ringattn::cuda::stage(params, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(block.staged.isnan().all().item<bool>());
  CHECK(all_are(pad.staged_by_this_rank, 0));
  CHECK(all_are(pad.read_by_peer, 1));
}
