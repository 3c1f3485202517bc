// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include "catch.h"
#include "device.h"
#include "meanwhile.h"
#include "peer_sync/protocol.h"
#include "stage_words.h"
#include "transport/symmetric/kernels/fetch.h"
#include "transport/symmetric/kernels/stage.h"

// One device, which fetches what it has staged itself: its own words stand for those of other
// ranks.

using ringattn::kGivenUp;
using ringattn::LaunchWords;
using ringattn::Notices;
using ringattn::cuda::FetchParams;
using ringattn::cuda::kStagePiece;
using ringattn::cuda::StageParams;
using ringattn::testing::all_are;
using ringattn::testing::Ends;
using ringattn::testing::kPeers;
using ringattn::testing::Meanwhile;
using ringattn::testing::Words;

namespace {

constexpr int kNothing = 255;

// A message of so many bytes, staged and fetched, and the words of both kernels.
struct Rotation {
  explicit Rotation(int64_t bytes)
      : bytes(bytes),
        sent(at::randint(kNothing, {bytes + kStagePiece}, bytes_on_device())),
        staged(at::full({bytes + kStagePiece}, kNothing, bytes_on_device())),
        received(at::full({bytes + kStagePiece}, kNothing, bytes_on_device())) {}

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
    words.give(params);
    return params;
  }
  FetchParams fetching(bool closely) const {
    FetchParams params;
    params.from = staged.data_ptr();
    params.to = received.data_ptr();
    params.bytes = bytes;
    params.bringing.words.data = Words::word(launch_words, 0);
    params.bringing.failed = Words::word(words.others, 0);
    params.bringing.follows_staging = closely;
    Notices& notices = params.bringing.notices;
    notices.num_peers = kPeers;
    for (int i = 0; i < kPeers; ++i) {
      notices.staged[i] = Words::word(words.signals, i);
      notices.staged_for_streams[i] = Words::word(words.for_streams, i);
      notices.read[i] = Words::word(words.taken_back, i);
      notices.read_for_streams[i] = Words::word(words.back_for_streams, i);
      notices.read_here[i] = Words::word(read_here, i);
    }
    return params;
  }
  void launch(bool closely) const {
    words.awaited.fill_(1);  // the others are staging
    ringattn::cuda::load_fetch();
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(ringattn::cuda::stage(staging(), nullptr) == cudaSuccess);
    REQUIRE(ringattn::cuda::fetch(fetching(closely), nullptr) == cudaSuccess);
  }

  bool has_come() const {
    return at::equal(received.narrow(0, 0, bytes), sent.narrow(0, 0, bytes)) &&
           all_are(received.narrow(0, bytes, kStagePiece), kNothing);
  }
  // As the next one needs them.
  bool words_are_back() const {
    return all_are(words.signals, 0) && all_are(words.for_streams, 0) &&
           all_are(words.taken_back, 1) && all_are(words.back_for_streams, 1) &&
           all_are(launch_words, 0) && all_are(words.counters, 0);
  }

  int64_t bytes;
  at::Tensor sent, staged, received;
  Words words;
  at::Tensor read_here = at::ones({kPeers}, at::TensorOptions(at::kCUDA).dtype(at::kInt));
  at::Tensor launch_words = at::zeros({LaunchWords::kFirstArrival}, read_here.options());
};

}  // namespace

TEST_CASE("what is staged is fetched by the kernel behind, to the byte, again and again") {
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
        CHECK(rotation.has_come());
        CHECK(rotation.words_are_back());
      }
    }
  }
}

TEST_CASE("who has fetched waits until others have, or calls come to nothing") {
  if (!has_device()) return;
  const Meanwhile meanwhile;
  for (const Ends ends : {Ends::kByItself, Ends::kFailed}) {
    const Rotation rotation(1000);
    rotation.read_here[1].zero_();
    rotation.launch(/*closely=*/true);
    CHECK_FALSE(meanwhile.ends_soon());
    CHECK(meanwhile.read(rotation.words.taken_back) == 1);
    if (ends == Ends::kByItself) {
      meanwhile.write(rotation.read_here[1], 1);
    } else {
      meanwhile.write(rotation.words.others[0], static_cast<int>(kGivenUp));
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(rotation.has_come());
    CHECK(rotation.words_are_back());
  }
}
