// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include "catch.h"
#include "device.h"
#include "peer_sync/protocol.h"
#include "side_stream.h"
#include "stage_signals.h"
#include "transport/symmetric/kernels/fetch.h"
#include "transport/symmetric/kernels/stage.h"

// One device, which fetches what it has staged itself: its own pad stands for those of its peers.

using ringattn::kGivenUp;
using ringattn::LaunchScratch;
using ringattn::PeerSignals;
using ringattn::cuda::FetchParams;
using ringattn::cuda::kVectorBytes;
using ringattn::cuda::StageParams;
using ringattn::testing::all_are;
using ringattn::testing::Ends;
using ringattn::testing::kPeers;
using ringattn::testing::Pad;
using ringattn::testing::SideStream;

namespace {

constexpr int kNothing = 255;

// A message of so many bytes, staged and fetched, and the signals of both kernels.
struct Rotation {
  explicit Rotation(int64_t bytes)
      : bytes(bytes),
        sent(at::randint(kNothing, {bytes + kVectorBytes}, bytes_on_device())),
        staged(at::full({bytes + kVectorBytes}, kNothing, bytes_on_device())),
        received(at::full({bytes + kVectorBytes}, kNothing, bytes_on_device())) {}

  static at::TensorOptions bytes_on_device() {
    return at::TensorOptions(at::kCUDA).dtype(at::kByte);
  }

  StageParams staging() const {
    StageParams params;
    params.k.data = sent.data_ptr();
    params.keys_only = true;
    params.rows = params.staged_rows = 1;
    params.row_bytes = bytes;
    params.staged = staged.data_ptr();
    params.kernel_fetches = true;
    pad.add_to(params);
    return params;
  }
  FetchParams fetching(bool closely) const {
    FetchParams params;
    params.from = staged.data_ptr();
    params.to = received.data_ptr();
    params.bytes = bytes;
    params.remote_fetch.scratch.data = Pad::at(scratch, 0);
    params.remote_fetch.failed = Pad::at(pad.others, 0);
    params.remote_fetch.follows_staging = closely;
    PeerSignals& signals = params.remote_fetch.signals;
    signals.num_peers = kPeers;
    for (int i = 0; i < kPeers; ++i) {
      signals.staged_by_peer[i] = Pad::at(pad.staged_by_this_rank, i);
      signals.staged_mirror_by_peer[i] = Pad::at(pad.staged_mirror_by_this_rank, i);
      signals.read_by_this_rank[i] = Pad::at(pad.read_by_peer, i);
      signals.read_mirror_by_this_rank[i] = Pad::at(pad.read_mirror_by_peer, i);
      signals.read_by_peer[i] = Pad::at(read_by_peer, i);
    }
    return params;
  }
  void launch(bool closely) const {
    pad.staged_by_peer.fill_(1);  // the peers are staging
    ringattn::cuda::load_fetch();
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(ringattn::cuda::stage(staging(), nullptr) == cudaSuccess);
    REQUIRE(ringattn::cuda::fetch(fetching(closely), nullptr) == cudaSuccess);
  }

  bool has_arrived() const {
    return at::equal(received.narrow(0, 0, bytes), sent.narrow(0, 0, bytes)) &&
           all_are(received.narrow(0, bytes, kVectorBytes), kNothing);
  }
  // As the next call needs them.
  bool signals_are_reset() const {
    return all_are(pad.staged_by_this_rank, 0) && all_are(pad.staged_mirror_by_this_rank, 0) &&
           all_are(pad.read_by_peer, 1) && all_are(pad.read_mirror_by_peer, 1) &&
           all_are(scratch, 0) && all_are(pad.counters, 0);
  }

  int64_t bytes;
  at::Tensor sent, staged, received;
  Pad pad;
  at::Tensor read_by_peer = at::ones({kPeers}, at::TensorOptions(at::kCUDA).dtype(at::kInt));
  at::Tensor scratch = at::zeros({LaunchScratch::kFirstArrival}, read_by_peer.options());
};

}  // namespace

TEST_CASE("a staged message is fetched by the next kernel, to the byte, call after call") {
  if (!has_device()) return;
  for (const int64_t bytes : {0, 1, 16, 1000, 65536, 1 << 20, (5 << 20) + 3}) {
    for (const bool closely : {true, false}) {
      INFO(bytes << " bytes, closely: " << closely);
      const Rotation rotation(bytes);
      for (int call = 0; call < 3; ++call) {
        rotation.sent.random_(kNothing);
        rotation.received.fill_(kNothing);
        rotation.launch(closely);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        CHECK(rotation.has_arrived());
        CHECK(rotation.signals_are_reset());
      }
    }
  }
}

TEST_CASE("a fetching kernel waits until its peers have read, or the call has failed") {
  if (!has_device()) return;
  const SideStream side;
  for (const Ends ends : {Ends::kByItself, Ends::kFailed}) {
    const Rotation rotation(1000);
    rotation.read_by_peer[1].zero_();
    rotation.launch(/*closely=*/true);
    CHECK_FALSE(side.ends_soon());
    CHECK(side.read(rotation.pad.read_by_peer) == 1);
    if (ends == Ends::kByItself) {
      side.write(rotation.read_by_peer[1], 1);
    } else {
      side.write(rotation.pad.others[0], static_cast<int>(kGivenUp));
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(rotation.has_arrived());
    CHECK(rotation.signals_are_reset());
  }
}
