// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "catch.h"

// The kernel that fetches, the device code itself, on threads for lanes. Note: under another name,
// since the library that the tests link has the one for devices.
#define ringattn ringattn_on_lanes
#include "transport/symmetric/kernels/fetch.cu"

namespace {

using namespace ringattn;
using namespace ringattn::cuda;

constexpr int kPeers = 3;
constexpr uint8_t kNothing = 0xff;
constexpr uint32_t kWorking = 11, kBringing = 12, kTold = 13, kWaiting = 14;

bool all_are(const uint32_t* words, uint32_t value) {
  return std::all_of(words, words + kPeers, [&](uint32_t word) { return word == value; });
}

// A block of so many bytes on its way, which all have staged and read.
struct Call {
  explicit Call(int64_t bytes)
      : bytes(bytes), from(bytes + 2 * kStagePiece), to(bytes + 2 * kStagePiece, kNothing) {
    fill();
    params.from = from.data();
    params.to = to.data();
    params.bytes = bytes;
    Bringing& bringing = params.bringing;
    bringing.words.data = words;
    bringing.failed = &failed;
    bringing.given_up = &given_up;
    bringing.follows_staging = true;
    Notices& notices = bringing.notices;
    notices.num_peers = kPeers;
    for (int i = 0; i < kPeers; ++i) {
      notices.staged[i] = &staged[i];
      notices.read[i] = &read[i];
      notices.staged_for_streams[i] = &staged_for_streams[i];
      notices.read_for_streams[i] = &read_for_streams[i];
      notices.read_here[i] = &read_here[i];
    }
    notices.phase = &phase;
    notices.phase_working = kWorking;
    notices.phase_bringing = kBringing;
    notices.phase_told = kTold;
    notices.phase_waiting = kWaiting;
  }
  ~Call() { on_store_release = nullptr; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void fill() {
    for (size_t i = 0; i < from.size(); ++i)
      from[i] = static_cast<uint8_t>((i * 40503u >> 3) % 251);
  }
  // And nothing behind it.
  bool has_come() const {
    return std::equal(to.begin(), to.begin() + bytes, from.begin()) &&
           std::all_of(to.begin() + bytes, to.end(), [](uint8_t byte) { return byte == kNothing; });
  }
  bool nothing_has_come() const {
    return std::all_of(to.begin(), to.end(), [](uint8_t byte) { return byte == kNothing; });
  }
  // Whether everybody has been told, and all is as the next call needs it.
  bool is_over() const {
    return all_are(staged, 0) && all_are(staged_for_streams, 0) && all_are(read, 1) &&
           all_are(read_for_streams, 1) && words[LaunchWords::kWarpsDone] == 0;
  }

  // A peer signals once this device has shown a phase for a while, after 10 s in any case. Returns
  // the phase that the device showed then.
  uint32_t hears(uint32_t& word, uint32_t value, uint32_t expected) {
    uint32_t shown = kNothing;
    for (int tries = 0; tries < 50; ++tries) {  // a loaded machine may not have come that far
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      shown = __atomic_load_n(&phase, __ATOMIC_RELAXED);
      if (shown == expected) break;
    }
    comes = true;
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
    return shown;
  }

  std::atomic<bool> comes{false};  // what hears() waits with
  int64_t bytes;
  std::vector<uint8_t> from, to;
  uint32_t words[LaunchWords::kFirstArrival] = {};
  uint32_t staged[kPeers] = {staged_heads(1), staged_heads(1), staged_heads(1)};
  uint32_t staged_for_streams[kPeers] = {7, 7, 7}, read[kPeers] = {}, read_for_streams[kPeers] = {};
  uint32_t read_here[kPeers] = {1, 1, 1}, failed = 0, given_up = 0, phase = 0;
  FetchParams params;
};

}  // namespace

TEST_CASE("on lanes: what a peer has staged is fetched, and all are told when it is there") {
  // Four thread blocks of 512 threads with eight pieces each: some rounds, some pieces, none.
  lanes::multiprocessors = 16;
  for (const int64_t bytes : {0, 1, 16, 8191, 8192, 100003, 262144, 600001}) {
    INFO(bytes << " bytes");
    Call call(bytes);
    std::atomic<bool> too_early{false};
    on_store_release = [&](const uint32_t* word, uint32_t) {
      const int64_t peer = word - call.read;
      const bool is_read = 0 <= peer && peer < kPeers;
      if (!is_read || !call.has_come() || call.staged[peer] != 0) too_early = true;
    };
    REQUIRE(fetch(call.params, nullptr) == cudaSuccess);
    CHECK(call.has_come());
    CHECK_FALSE(too_early);
    CHECK(call.is_over());
    CHECK(call.phase == kWorking);
  }
}

TEST_CASE("on lanes: nothing is fetched before all peers have staged") {
  lanes::multiprocessors = 8;
  for (const int late : {0, kPeers - 1}) {
    Call call(5000);
    call.staged[late] = kBeingStaged;
    std::fill(call.from.begin(), call.from.end(), kNothing - 1);
    uint32_t shown = 0;
    std::thread peer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      call.fill();
      shown = call.hears(call.staged[late], staged_heads(1), kBringing);
    });
    const cudaError_t error = fetch(call.params, nullptr);
    peer.join();
    CHECK(error == cudaSuccess);
    CHECK(shown == kBringing);
    CHECK(call.has_come());
    CHECK(call.is_over());
  }
}

TEST_CASE("on lanes: what streams are told of a fetched block is taken back when it has come") {
  lanes::multiprocessors = 4;
  Call call(5000);
  call.staged_for_streams[1] = 0;
  std::atomic<bool> too_early{false};
  on_store_release = [&](const uint32_t* word, uint32_t) {
    if (word == &call.read[1] && !call.comes) too_early = true;
  };
  uint32_t shown = 0;
  std::thread peer([&] { shown = call.hears(call.staged_for_streams[1], 7, kTold); });
  const cudaError_t error = fetch(call.params, nullptr);
  peer.join();
  CHECK(error == cudaSuccess);
  CHECK(shown == kTold);
  CHECK(call.phase == kWorking);
  CHECK_FALSE(too_early);
  CHECK(call.is_over());
}

TEST_CASE("on lanes: who has fetched tells the others, and then waits until they have") {
  lanes::multiprocessors = 4;
  Call call(5000);
  call.read_here[2] = 0;
  uint32_t shown = 0;
  std::thread peer([&] { shown = call.hears(call.read_here[2], 1, kWaiting); });
  const cudaError_t error = fetch(call.params, nullptr);
  const bool has_come = call.comes;
  peer.join();
  CHECK(error == cudaSuccess);
  CHECK(shown == kWaiting);
  CHECK(has_come);
  CHECK(call.has_come());
  CHECK(call.is_over());
  CHECK(call.phase == kWorking);
}

TEST_CASE("on lanes: where calls come to nothing nothing is fetched, and nobody waits") {
  lanes::multiprocessors = 8;
  enum class Known { kFailed, kByTheHost };
  for (const Known known : {Known::kFailed, Known::kByTheHost}) {
    Call call(5000);
    (known == Known::kFailed ? call.failed : call.given_up) = kGivenUp;
    call.staged[1] = 0;
    call.read_here[1] = 0;
    REQUIRE(fetch(call.params, nullptr) == cudaSuccess);
    CHECK(call.nothing_has_come());
    CHECK(call.failed == kGivenUp);
  }
}
