// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "catch.h"

// The fetching kernel's device code, with a host thread for each device thread. Note: in a
// namespace of another name, since the library that the tests link has the kernel for devices.
#define ringattn ringattn_emulated
#include "transport/symmetric/kernels/fetch.cu"

namespace {

using namespace ringattn;
using namespace ringattn::cuda;

constexpr int kPeers = 3;
constexpr uint8_t kNothing = 0xff;
constexpr uint32_t kNotWaiting = 11, kUntilStaged = 12, kUntilMirrored = 13, kUntilRead = 14;

bool all_are(const uint32_t* values, uint32_t value) {
  return std::all_of(values, values + kPeers, [&](uint32_t each) { return each == value; });
}

// The fetch of a block that all peers have staged, while they have read this rank's.
struct Call {
  explicit Call(int64_t bytes)
      : bytes(bytes), from(bytes + 2 * kVectorBytes), to(bytes + 2 * kVectorBytes, kNothing) {
    fill();
    params.from = from.data();
    params.to = to.data();
    params.bytes = bytes;
    RemoteFetch& remote_fetch = params.remote_fetch;
    remote_fetch.scratch.data = scratch;
    remote_fetch.failed = &failed;
    remote_fetch.given_up = &given_up;
    remote_fetch.follows_staging = true;
    PeerSignals& signals = remote_fetch.signals;
    signals.num_peers = kPeers;
    for (int i = 0; i < kPeers; ++i) {
      signals.staged_by_peer[i] = &staged[i];
      signals.read_by_this_rank[i] = &read_by_this_rank[i];
      signals.staged_mirror_by_peer[i] = &staged_mirror[i];
      signals.read_mirror_by_this_rank[i] = &read_mirror_by_this_rank[i];
      signals.read_by_peer[i] = &read_by_peer[i];
    }
    signals.phase = &phase;
    signals.phase_working = kNotWaiting;
    signals.phase_until_staged = kUntilStaged;
    signals.phase_until_mirrored = kUntilMirrored;
    signals.phase_until_read = kUntilRead;
  }
  ~Call() { on_store_release = nullptr; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void fill() {
    for (size_t i = 0; i < from.size(); ++i)
      from[i] = static_cast<uint8_t>((i * 40503u >> 3) % 251);
  }
  // And nothing behind it.
  bool has_arrived() const {
    return std::equal(to.begin(), to.begin() + bytes, from.begin()) &&
           std::all_of(to.begin() + bytes, to.end(), [](uint8_t byte) { return byte == kNothing; });
  }
  bool nothing_has_arrived() const {
    return std::all_of(to.begin(), to.end(), [](uint8_t byte) { return byte == kNothing; });
  }
  // Whether all peers are signalled, and all is as the next call needs it.
  bool is_over() const {
    return all_are(staged, 0) && all_are(staged_mirror, 0) && all_are(read_by_this_rank, 1) &&
           all_are(read_mirror_by_this_rank, 1) && scratch[LaunchScratch::kWarpsDone] == 0;
  }

  // A peer signals once this device shows the expected phase, after ten minutes in any case: 512
  // threads take their time on a busy machine. Returns the phase that the device showed then.
  uint32_t receives(uint32_t& signal, uint32_t value, uint32_t expected) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(10);
    uint32_t shown = kNothing;
    while (shown != expected && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      shown = __atomic_load_n(&phase, __ATOMIC_RELAXED);
    }
    comes = true;
    __atomic_store_n(&signal, value, __ATOMIC_RELEASE);
    return shown;
  }

  std::atomic<bool> comes{false};  // what receives() waits with
  int64_t bytes;
  std::vector<uint8_t> from, to;
  uint32_t scratch[LaunchScratch::kFirstArrival] = {};
  uint32_t staged[kPeers] = {staged_heads(1), staged_heads(1), staged_heads(1)};
  uint32_t staged_mirror[kPeers] = {7, 7, 7}, read_by_this_rank[kPeers] = {},
           read_mirror_by_this_rank[kPeers] = {};
  uint32_t read_by_peer[kPeers] = {1, 1, 1}, failed = 0, given_up = 0, phase = 0;
  FetchParams params;
};

}  // namespace

TEST_CASE("emulated: what a peer has staged is fetched, and then all peers are signalled") {
  // Four thread blocks of 512 threads with eight vectors each: several rounds, one, none.
  emulator::multiprocessors = 16;
  for (const int64_t bytes : {0, 1, 16, 8191, 8192, 100003, 262144, 600001}) {
    INFO(bytes << " bytes");
    Call call(bytes);
    std::atomic<bool> too_early{false};
    on_store_release = [&](const uint32_t* signal, uint32_t) {
      const int64_t peer = signal - call.read_by_this_rank;
      const bool is_read = 0 <= peer && peer < kPeers;
      if (!is_read || !call.has_arrived() || call.staged[peer] != 0) too_early = true;
    };
    REQUIRE(fetch(call.params, nullptr) == cudaSuccess);
    CHECK(call.has_arrived());
    CHECK_FALSE(too_early);
    CHECK(call.is_over());
    CHECK(call.phase == kNotWaiting);
  }
}

TEST_CASE("emulated: nothing is fetched before all peers have staged") {
  emulator::multiprocessors = 8;
  for (const int late : {0, kPeers - 1}) {
    Call call(5000);
    call.staged[late] = kBeingStaged;
    std::fill(call.from.begin(), call.from.end(), kNothing - 1);
    uint32_t shown = 0;
    std::thread peer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      call.fill();
      shown = call.receives(call.staged[late], staged_heads(1), kUntilStaged);
    });
    const cudaError_t error = fetch(call.params, nullptr);
    peer.join();
    CHECK(error == cudaSuccess);
    CHECK(shown == kUntilStaged);
    CHECK(call.has_arrived());
    CHECK(call.is_over());
  }
}

TEST_CASE("emulated: the mirror of `staged` is awaited before it is cleared") {
  emulator::multiprocessors = 4;
  Call call(5000);
  call.staged_mirror[1] = 0;
  std::atomic<bool> too_early{false};
  on_store_release = [&](const uint32_t* signal, uint32_t) {
    if (signal == &call.read_by_this_rank[1] && !call.comes) too_early = true;
  };
  uint32_t shown = 0;
  std::thread peer([&] { shown = call.receives(call.staged_mirror[1], 7, kUntilMirrored); });
  const cudaError_t error = fetch(call.params, nullptr);
  peer.join();
  CHECK(error == cudaSuccess);
  CHECK(shown == kUntilMirrored);
  CHECK(call.phase == kNotWaiting);
  CHECK_FALSE(too_early);
  CHECK(call.is_over());
}

TEST_CASE(
    "emulated: a kernel that has fetched signals its peers, then waits until they have read") {
  emulator::multiprocessors = 4;
  Call call(5000);
  call.read_by_peer[2] = 0;
  uint32_t shown = 0;
  std::thread peer([&] { shown = call.receives(call.read_by_peer[2], 1, kUntilRead); });
  const cudaError_t error = fetch(call.params, nullptr);
  const bool has_come = call.comes;
  peer.join();
  CHECK(error == cudaSuccess);
  CHECK(shown == kUntilRead);
  CHECK(has_come);
  CHECK(call.has_arrived());
  CHECK(call.is_over());
  CHECK(call.phase == kNotWaiting);
}

TEST_CASE("emulated: after a failure nothing is fetched, and the kernel does not wait") {
  emulator::multiprocessors = 8;
  enum class Known { kFailed, kByTheHost };
  for (const Known known : {Known::kFailed, Known::kByTheHost}) {
    Call call(5000);
    (known == Known::kFailed ? call.failed : call.given_up) = kGivenUp;
    call.staged[1] = 0;
    call.read_by_peer[1] = 0;
    REQUIRE(fetch(call.params, nullptr) == cudaSuccess);
    CHECK(call.nothing_has_arrived());
    CHECK(call.failed == kGivenUp);
  }
}
