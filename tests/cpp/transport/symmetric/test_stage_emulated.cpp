// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "catch.h"

// The staging kernel's device code, with a host thread for each device thread. Note: in a namespace
// of another name, since the library that the tests link has the kernel for devices.
#define ringattn ringattn_emulated
#include "transport/symmetric/kernels/stage.cu"

namespace {

using namespace ringattn;
using namespace ringattn::cuda;

constexpr int kPeers = 3;
constexpr uint16_t kNothing = 0xffff;
constexpr uint32_t kTag = 77;

struct Shape {
  int batch, rows, heads, head_dim;
  int staged_rows;  // `rows` or more
};

// The signals of a call: this rank's pad stands for those of its peers.
struct Pad {
  uint32_t staged_by_this_rank[kPeers] = {}, staged_mirror_by_this_rank[kPeers] = {};
  uint32_t staged_by_peer[kPeers] = {1, 1, 1};
  uint32_t read_by_peer[kPeers] = {1, 1, 1}, read_mirror_by_peer[kPeers] = {1, 1, 1};
  uint32_t tag_by_this_rank[kPeers] = {}, tag_by_peer[kPeers] = {kTag, kTag, kTag}, mismatch = 0;
  uint32_t counters[kStageCounters] = {};
  uint32_t failed = 0, given_up = 0, given_up_copy = 0, calls = 6, host_calls = 0, host_phase = 0;
};

// k and v [B, rows, 3 * H + 1, D], of which H heads each are given, and where they are staged.
class Call {
 public:
  Call(const Shape& shape, bool kernel_fetches)
      : shape_(shape),
        given_(int64_t{shape.batch} * shape.rows * heads_given() * shape.head_dim),
        staged_(int64_t{shape.heads} * 2 * shape.batch * shape.staged_rows * shape.head_dim,
                kNothing) {
    for (size_t i = 0; i < given_.size(); ++i) given_[i] = static_cast<uint16_t>(i * 40503u >> 3);
    const int64_t row = int64_t{2} * heads_given() * shape.head_dim;
    for (StageSource* source : {&params.k, &params.v}) {
      *source = {given_.data() + (source == &params.k ? 1 : 2) * shape.heads * shape.head_dim,
                 shape.rows * row, row, 2 * shape.head_dim};
    }
    params.staged = staged_.data();
    params.batch = shape.batch;
    params.rows = shape.rows;
    params.staged_rows = shape.staged_rows;
    params.num_kv_heads = shape.heads;
    params.row_bytes = 2 * shape.head_dim;
    for (int i = 0; i < kPeers; ++i) {
      params.staged_by_this_rank[i] = &pad.staged_by_this_rank[i];
      params.read_by_peer[i] = &pad.read_by_peer[i];
      params.staged_mirror_by_this_rank[i] = &pad.staged_mirror_by_this_rank[i];
      params.read_mirror_by_peer[i] = &pad.read_mirror_by_peer[i];
      params.staged_by_peer[i] = &pad.staged_by_peer[i];
      params.tags.by_this_rank[i] = &pad.tag_by_this_rank[i];
      params.tags.by_peer[i] = &pad.tag_by_peer[i];
    }
    params.tags.value = kTag;
    params.tags.mismatch = &pad.mismatch;
    params.num_peers = kPeers;
    params.kernel_fetches = kernel_fetches;
    params.num_awaited = kernel_fetches ? kPeers : 0;
    params.failed = &pad.failed;
    params.given_up = &pad.given_up;
    params.given_up_copy = &pad.given_up_copy;
    params.blocks_done = pad.counters;
    params.calls = &pad.calls;
    params.host_calls = &pad.host_calls;
    params.host_phase = &pad.host_phase;
    params.phase = 9;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Whether all of these heads are there, and nothing of rows that are not written.
  bool has_staged(int first_head, int last_head) const {
    const int64_t plane = int64_t{shape_.staged_rows} * shape_.head_dim;
    for (int head = first_head; head < last_head; ++head) {
      for (int kind = 0; kind < 2; ++kind) {
        for (int batch = 0; batch < shape_.batch; ++batch) {
          const uint16_t* to =
              staged_.data() + ((int64_t{head} * 2 + kind) * shape_.batch + batch) * plane;
          for (int row = 0; row < shape_.staged_rows; ++row, to += shape_.head_dim) {
            for (int i = 0; i < shape_.head_dim; ++i) {
              const uint16_t expected = row < shape_.rows
                                            ? given(batch, row, (1 + kind) * shape_.heads + head, i)
                                            : kNothing;
              if (to[i] != expected) return false;
            }
          }
        }
      }
    }
    return true;
  }
  bool has_staged_nothing() const {
    for (const uint16_t element : staged_) {
      if (element != kNothing) return false;
    }
    return true;
  }

  StageParams params;
  Pad pad;

 private:
  int heads_given() const { return 3 * shape_.heads + 1; }
  uint16_t given(int batch, int row, int head, int i) const {
    return given_[((int64_t{batch} * shape_.rows + row) * heads_given() + head) * shape_.head_dim +
                  i];
  }

  Shape shape_;
  std::vector<uint16_t> given_, staged_;
};

// Counts what goes wrong while a launch runs.
struct Faults {
  std::atomic<int> early_heads{0}, early_signal{0}, early_tag{0}, early_mirror{0};
  std::atomic<int> triggers_early{0}, falls_back{0};

  // Watches a call's launch for as long as it exists.
  Faults(const Call& call, unsigned blocks) {
    on_store_release = [this, &call](const uint32_t* signal, uint32_t value) {
      if (value <= __atomic_load_n(signal, __ATOMIC_RELAXED)) ++falls_back;
      const int64_t i = signal - call.pad.staged_mirror_by_this_rank;
      if (0 <= i && i < kPeers) {
        const uint32_t all = staged_heads(call.params.num_kv_heads);
        const uint32_t staged = __atomic_load_n(&call.pad.staged_by_this_rank[i], __ATOMIC_RELAXED);
        if (staged != all || call.pad.read_mirror_by_peer[i] != 0) ++early_mirror;
        return;
      }
      const int64_t peer = signal - call.pad.staged_by_this_rank;
      if (value == kBeingStaged && call.pad.read_by_peer[peer] != 0) ++early_signal;
      if (value == kBeingStaged && call.pad.tag_by_this_rank[peer] != kTag) ++early_tag;
      if (value > kBeingStaged) {
        const int heads = static_cast<int>(value - kBeingStaged);
        if (!call.has_staged(0, heads)) ++early_heads;
      }
    };
    on_trigger_next = [this, &call, blocks] {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool is_first = triggering_.insert(blockIdx.x).second;
      if (!is_first || triggering_.size() < blocks) return;
      for (const uint32_t& read : call.pad.read_by_peer) {
        if (__atomic_load_n(&read, __ATOMIC_RELAXED) != 0) ++triggers_early;
      }
    };
  }
  ~Faults() {
    on_store_release = nullptr;
    on_trigger_next = nullptr;
  }

  bool triggers(unsigned blocks) const { return triggering_.size() == blocks; }

 private:
  std::mutex mutex_;
  std::set<unsigned> triggering_;
};

bool all_are(const uint32_t* values, int count, uint32_t value) {
  return std::all_of(values, values + count, [&](uint32_t each) { return each == value; });
}

// Resets the callbacks at the end of a test.
struct Callbacks {
  ~Callbacks() {
    on_store_release = nullptr;
    on_trigger_next = nullptr;
  }
};

unsigned copying_blocks(const Shape& shape, bool kernel_fetches) {
  const int64_t plane = int64_t{shape.rows} * ((2 * shape.head_dim + 15) / 16);  // vectors
  const int64_t chunks = shape.heads * 2 * shape.batch * ((plane + 255) / 256);
  const int64_t max_blocks =
      kernel_fetches ? emulator::multiprocessors / 4 : emulator::multiprocessors;
  return static_cast<unsigned>(std::clamp<int64_t>((chunks + 31) / 32, 1, max_blocks));
}

}  // namespace

TEST_CASE("emulated: heads are signalled once they are staged, and counters are 0 again") {
  const std::vector<Shape> shapes = {{1, 1, 1, 8, 1},
                                     {2, 257, 5, 72, 300},
                                     {1, 0, 4, 64, 10},
                                     {3, 100, 2, 128, 101},
                                     {1, 33, 33, 200, 40}};
  for (const Shape& shape : shapes) {
    for (const bool kernel_fetches : {false, true}) {
      emulator::multiprocessors = kernel_fetches ? 8 : 2;
      INFO("B " << shape.batch << " S " << shape.rows << " H " << shape.heads << " D "
                << shape.head_dim << ", a kernel fetches: " << kernel_fetches);
      Call call(shape, kernel_fetches);
      const unsigned blocks = copying_blocks(shape, kernel_fetches) + 1;
      const Faults faults(call, blocks);
      REQUIRE(stage(call.params, nullptr) == cudaSuccess);
      CHECK(call.has_staged(0, shape.heads));
      CHECK(all_are(call.pad.staged_by_this_rank, kPeers, staged_heads(shape.heads)));
      CHECK(all_are(call.pad.tag_by_this_rank, kPeers, kTag));
      CHECK(all_are(call.pad.staged_mirror_by_this_rank, kPeers, kTag));
      CHECK(all_are(call.pad.read_mirror_by_peer, kPeers, 0));
      CHECK(all_are(call.pad.read_by_peer, kPeers, 0));
      CHECK(all_are(call.pad.counters, kStageCounters, 0));
      CHECK(call.pad.host_calls == 7);
      CHECK(call.pad.host_phase == 9);
      CHECK(faults.early_heads == 0);
      CHECK(faults.early_signal == 0);
      CHECK(faults.early_tag == 0);
      CHECK(faults.early_mirror == 0);
      CHECK(call.pad.mismatch == 0);
      CHECK(call.pad.failed == 0);
      CHECK(faults.falls_back == 0);
      CHECK(faults.triggers_early == 0);
      CHECK(faults.triggers(blocks));
    }
  }
}

TEST_CASE("emulated: what peers read in place is signalled like what is staged") {
  for (const uint32_t failure : {0u, kCallMismatch, kGivenUp}) {
    Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/false);
    Pad& pad = call.pad;
    pad.failed = failure;
    const Faults faults(call, 1);
    REQUIRE(signal_staged(call.params, nullptr) == cudaSuccess);
    const bool signals = failure != kGivenUp;
    const uint32_t tag = failure == 0 ? kTag : kMismatchTag;
    CHECK(call.has_staged_nothing());
    CHECK(all_are(pad.staged_by_this_rank, kPeers, signals ? staged_heads(2) : 0));
    CHECK(all_are(pad.staged_mirror_by_this_rank, kPeers, signals ? tag : 0));
    CHECK(all_are(pad.tag_by_this_rank, kPeers, signals ? tag : 0));
    CHECK(all_are(pad.read_by_peer, kPeers, signals ? 0 : 1));
    CHECK(all_are(pad.read_mirror_by_peer, kPeers, signals ? 0 : 1));
    CHECK(pad.host_calls == 7);
    CHECK(pad.host_phase == 0);
    CHECK(faults.early_mirror == 0);
    CHECK(faults.falls_back == 0);
  }
}

TEST_CASE("emulated: many heads are signalled group by group") {
  emulator::multiprocessors = 4;
  Call call({1, 700, 9, 128, 700}, /*kernel_fetches=*/true);
  std::set<uint32_t> signalled;
  const Callbacks callbacks;
  on_store_release = [&](const uint32_t* signal, uint32_t value) {
    if (signal == call.pad.staged_by_this_rank) signalled.insert(value);
  };
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  // One thread block copies 32 chunks a round; 18 planes of 44 chunks make groups of two heads.
  CHECK(signalled == std::set<uint32_t>{kBeingStaged, staged_heads(2), staged_heads(4),
                                        staged_heads(6), staged_heads(8), staged_heads(9)});
}

TEST_CASE("emulated: a rank that has given up stages nothing and signals nothing") {
  emulator::multiprocessors = 8;
  for (const bool kernel_fetches : {true, false}) {
    for (const bool known_by_copy : {true, false}) {
      Call call({1, 300, 3, 64, 300}, kernel_fetches);
      (known_by_copy ? call.pad.given_up_copy : call.pad.failed) = kGivenUp;
      REQUIRE(stage(call.params, nullptr) == cudaSuccess);
      CHECK(call.has_staged_nothing());
      CHECK(all_are(call.pad.staged_by_this_rank, kPeers, 0));
      CHECK(all_are(call.pad.read_by_peer, kPeers, 1));
      CHECK(all_are(call.pad.staged_mirror_by_this_rank, kPeers, 0));
      CHECK(all_are(call.pad.read_mirror_by_peer, kPeers, 1));
    }
  }
}

TEST_CASE("emulated: no signal is given before all signals of the last call have arrived") {
  emulator::multiprocessors = 4;
  for (const bool kernel_fetches : {true, false}) {
    Call call({1, 64, 2, 64, 64}, kernel_fetches);
    call.pad.read_by_peer[1] = 0;  // in flight
    std::atomic<bool> comes{false}, too_early{false};
    const Callbacks callbacks;
    on_store_release = [&](const uint32_t*, uint32_t) {
      if (!comes) too_early = true;
    };
    std::thread peer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      comes = true;
      __atomic_store_n(&call.pad.read_by_peer[1], 1, __ATOMIC_RELEASE);
    });
    const cudaError_t error = stage(call.params, nullptr);
    peer.join();
    CHECK(error == cudaSuccess);
    CHECK_FALSE(too_early);
    CHECK(all_are(call.pad.read_by_peer, kPeers, 0));
    CHECK(all_are(call.pad.staged_mirror_by_this_rank, kPeers, kTag));
  }
}

TEST_CASE("emulated: `failed` is set from given_up_copy before the next kernel is triggered") {
  emulator::multiprocessors = 8;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
  call.pad.given_up_copy = kGivenUp;
  std::atomic<bool> too_early{false};
  const Callbacks callbacks;
  on_trigger_next = [&] {
    const bool waits = blockIdx.x == gridDim.x - 1;
    if (waits && threadIdx.x == 0 && call.pad.failed == 0) too_early = true;
  };
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  CHECK_FALSE(too_early);
  CHECK(call.pad.failed == kGivenUp);
}

TEST_CASE("emulated: a peer in another call is detected before the next kernel is triggered") {
  emulator::multiprocessors = 8;
  for (const int other : {0, kPeers - 1}) {
    for (const uint32_t tag : {kTag + 1, kMismatchTag}) {
      Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
      Pad& pad = call.pad;
      pad.tag_by_peer[other] = tag;
      std::atomic<bool> too_early{false};
      const Callbacks callbacks;
      on_trigger_next = [&] {
        const bool waits = blockIdx.x == gridDim.x - 1;
        if (waits && threadIdx.x == 0 && pad.failed == 0) too_early = true;
      };
      REQUIRE(stage(call.params, nullptr) == cudaSuccess);
      CHECK_FALSE(too_early);
      CHECK(pad.failed == kCallMismatch);
      CHECK(pad.mismatch == 1u + other + (tag == kMismatchTag ? kMaxPeers : 0));
      // Peers can detect it too, whichever thread block comes first.
      CHECK((all_are(pad.tag_by_this_rank, kPeers, kTag) ||
             all_are(pad.tag_by_this_rank, kPeers, kMismatchTag)));
      CHECK(all_are(pad.staged_by_this_rank, kPeers, staged_heads(2)));
    }
  }
}

TEST_CASE("emulated: a signal that does not arrive is not cleared, and its writer gets none") {
  emulator::multiprocessors = 4;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/false);
  Pad& pad = call.pad;
  pad.read_by_peer[1] = 0;
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    __atomic_store_n(&pad.given_up, kGivenUp, __ATOMIC_RELEASE);
  });
  const cudaError_t error = stage(call.params, nullptr);
  host.join();
  CHECK(error == cudaSuccess);
  CHECK(pad.failed == kGivenUp);
  CHECK(pad.tag_by_this_rank[1] == 0);
  CHECK(pad.read_mirror_by_peer[1] == 1);
  CHECK(pad.read_mirror_by_peer[2] == 0);
}

TEST_CASE("emulated: a rank that has detected a mismatch publishes it in its next call") {
  emulator::multiprocessors = 8;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
  call.pad.failed = kCallMismatch;
  call.pad.staged_by_peer[1] = 0;  // not waited for
  call.pad.tag_by_peer[0] = kTag + 1;
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  CHECK(all_are(call.pad.tag_by_this_rank, kPeers, kMismatchTag));
  CHECK(all_are(call.pad.staged_mirror_by_this_rank, kPeers, kMismatchTag));
  CHECK(all_are(call.pad.staged_by_this_rank, kPeers, staged_heads(2)));
  CHECK(call.pad.failed == kCallMismatch);
  CHECK(call.pad.mismatch == 0);
}

TEST_CASE("emulated: where no kernel fetches, tags are published but not compared") {
  emulator::multiprocessors = 2;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/false);
  call.pad.tag_by_peer[1] = kTag + 1;
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  CHECK(call.pad.failed == 0);
  CHECK(all_are(call.pad.tag_by_this_rank, kPeers, kTag));
}

TEST_CASE(
    "emulated: the next kernel is triggered when all peers are staging or the host gives up") {
  emulator::multiprocessors = 4;
  enum class Ends { kByItself, kFailed, kGivenUp };
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
    Pad& pad = call.pad;
    pad.staged_by_peer[1] = 0;
    std::atomic<bool> comes{false}, too_early{false};
    const Callbacks callbacks;
    on_trigger_next = [&] {
      if (blockIdx.x == 1 && !comes) too_early = true;  // the waiting thread block
    };
    std::thread host([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      comes = true;
      uint32_t& signal = ends == Ends::kByItself ? pad.staged_by_peer[1]
                         : ends == Ends::kFailed ? pad.failed
                                                 : pad.given_up;
      const uint32_t value = ends == Ends::kByItself ? kBeingStaged : kGivenUp;
      __atomic_store_n(&signal, value, __ATOMIC_RELEASE);
    });
    const cudaError_t error = stage(call.params, nullptr);
    host.join();
    CHECK(error == cudaSuccess);
    CHECK_FALSE(too_early);
    CHECK((pad.failed != 0) == (ends != Ends::kByItself));
    if (ends == Ends::kByItself) CHECK(call.has_staged(0, 2));
  }
}
