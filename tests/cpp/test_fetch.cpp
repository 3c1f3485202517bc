// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include "catch.h"
#include "core/remote_keys.h"
#include "device.h"
#include "meanwhile.h"
#include "transport/cuda/fetch.h"
#include "transport/cuda/stage.h"

// One device, which fetches what it has staged itself: its own words stand for those of other
// ranks.

using ringattn::kGivenUp;
using ringattn::LaunchWords;
using ringattn::Notices;
using ringattn::cuda::FetchParams;
using ringattn::cuda::kStageCounters;
using ringattn::cuda::kStagePiece;
using ringattn::cuda::StageParams;
using ringattn::testing::Ends;
using ringattn::testing::Meanwhile;

namespace {

constexpr int kPeers = 3;
constexpr int kTag = 77;
constexpr int kNothing = 255;

at::Tensor words_of(int64_t count, int value = 0) {
  return at::full({count}, value, at::TensorOptions(at::kCUDA).dtype(at::kInt));
}
uint32_t* word(const at::Tensor& words, int64_t i) {
  return reinterpret_cast<uint32_t*>(words.data_ptr<int>()) + i;
}
bool all_are(const at::Tensor& words, int value) { return words.eq(value).all().item<bool>(); }

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
    params.num_signals = params.num_awaited = kPeers;
    for (int i = 0; i < kPeers; ++i) {
      params.signals[i] = word(told, i);
      params.awaited[i] = word(told, i);
      params.signals_for_streams[i] = word(told_for_streams, i);
      params.taken_back[i] = word(read, i);
      params.taken_back_for_streams[i] = word(read_for_streams, i);
      params.tags.told[i] = word(tags, i);
      params.tags.theirs[i] = word(tags, i);
    }
    params.tags.own = kTag;
    params.tags.unlike = word(others, 0);
    params.blocks_done = word(counters, 0);
    params.failed = word(others, 1);
    params.calls = word(others, 2);
    params.calls_shown = word(others, 3);
    params.phase_shown = word(others, 4);
    return params;
  }
  FetchParams fetching(bool closely) const {
    FetchParams params;
    params.from = staged.data_ptr();
    params.to = received.data_ptr();
    params.bytes = bytes;
    params.bringing.words.data = word(launch_words, 0);
    params.bringing.failed = word(others, 1);
    params.bringing.follows_staging = closely;
    Notices& notices = params.bringing.notices;
    notices.num_peers = kPeers;
    for (int i = 0; i < kPeers; ++i) {
      notices.staged[i] = word(told, i);
      notices.staged_for_streams[i] = word(told_for_streams, i);
      notices.read[i] = word(read, i);
      notices.read_for_streams[i] = word(read_for_streams, i);
      notices.read_here[i] = word(read_here, i);
    }
    return params;
  }
  void launch(bool closely) const {
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
    return all_are(told, 0) && all_are(told_for_streams, 0) && all_are(read, 1) &&
           all_are(read_for_streams, 1) && all_are(launch_words, 0) && all_are(counters, 0);
  }

  int64_t bytes;
  at::Tensor sent, staged, received;
  at::Tensor told = words_of(kPeers), told_for_streams = words_of(kPeers);
  at::Tensor read = words_of(kPeers, 1), read_for_streams = words_of(kPeers, 1);
  at::Tensor read_here = words_of(kPeers, 1), tags = words_of(kPeers);
  at::Tensor launch_words = words_of(LaunchWords::kFirstArrival);
  at::Tensor counters = words_of(kStageCounters), others = words_of(5);
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
    CHECK(meanwhile.read(rotation.read) == 1);
    if (ends == Ends::kByItself) {
      meanwhile.write(rotation.read_here[1], 1);
    } else {
      meanwhile.write(rotation.others[1], static_cast<int>(kGivenUp));
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(rotation.has_come());
    CHECK(rotation.words_are_back());
  }
}
