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

// The staging kernel, the device code itself, on threads for lanes. Note: under another name, since
// the library that the tests link has the one for devices.
#define ringattn ringattn_on_lanes
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

// The words of a call.
struct Words {
  uint32_t signals[kPeers] = {}, taken_back[kPeers] = {1, 1, 1}, awaited[kPeers] = {1, 1, 1};
  uint32_t for_streams[kPeers] = {}, back_for_streams[kPeers] = {1, 1, 1};
  uint32_t told[kPeers] = {}, theirs[kPeers] = {kTag, kTag, kTag}, unlike = 0;
  uint32_t counters[kStageCounters] = {};
  uint32_t failed = 0, given_up = 0, seen = 0, calls = 6, calls_shown = 0, phase_shown = 0;
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
      params.signals[i] = &words.signals[i];
      params.taken_back[i] = &words.taken_back[i];
      params.signals_for_streams[i] = &words.for_streams[i];
      params.taken_back_for_streams[i] = &words.back_for_streams[i];
      params.awaited[i] = &words.awaited[i];
      params.tags.told[i] = &words.told[i];
      params.tags.theirs[i] = &words.theirs[i];
    }
    params.tags.own = kTag;
    params.tags.unlike = &words.unlike;
    params.num_signals = kPeers;
    params.kernel_fetches = kernel_fetches;
    params.num_awaited = kernel_fetches ? kPeers : 0;
    params.failed = &words.failed;
    params.given_up = &words.given_up;
    params.seen = &words.seen;
    params.blocks_done = words.counters;
    params.calls = &words.calls;
    params.calls_shown = &words.calls_shown;
    params.phase_shown = &words.phase_shown;
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
  Words words;

 private:
  int heads_given() const { return 3 * shape_.heads + 1; }
  uint16_t given(int batch, int row, int head, int i) const {
    return given_[((int64_t{batch} * shape_.rows + row) * heads_given() + head) * shape_.head_dim +
                  i];
  }

  Shape shape_;
  std::vector<uint16_t> given_, staged_;
};

// What goes wrong while a launch runs, where no test may say so.
struct Faults {
  std::atomic<int> early_heads{0}, early_word{0}, early_tag{0}, early_for_streams{0};
  std::atomic<int> begins_early{0}, falls_back{0};

  // Watches a call's launch until it is destroyed.
  Faults(const Call& call, unsigned blocks) {
    on_store_release = [this, &call](const uint32_t* word, uint32_t value) {
      if (value <= __atomic_load_n(word, __ATOMIC_RELAXED)) ++falls_back;
      const int64_t of_stream = word - call.words.for_streams;
      if (0 <= of_stream && of_stream < kPeers) {
        const uint32_t all = staged_heads(call.params.num_kv_heads);
        const uint32_t told = __atomic_load_n(&call.words.signals[of_stream], __ATOMIC_RELAXED);
        if (told != all || call.words.back_for_streams[of_stream] != 0) ++early_for_streams;
        return;
      }
      const int64_t peer = word - call.words.signals;
      if (value == kBeingStaged && call.words.taken_back[peer] != 0) ++early_word;
      if (value == kBeingStaged && call.words.told[peer] != kTag) ++early_tag;
      if (value > kBeingStaged) {
        const int heads = static_cast<int>(value - kBeingStaged);
        if (!call.has_staged(0, heads)) ++early_heads;
      }
    };
    on_let_next_begin = [this, &call, blocks] {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool is_first = beginning_.insert(blockIdx.x).second;
      if (!is_first || beginning_.size() < blocks) return;
      for (const uint32_t& word : call.words.taken_back) {
        if (__atomic_load_n(&word, __ATOMIC_RELAXED) != 0) ++begins_early;
      }
    };
  }
  ~Faults() {
    on_store_release = nullptr;
    on_let_next_begin = nullptr;
  }

  bool lets_begin(unsigned blocks) const { return beginning_.size() == blocks; }

 private:
  std::mutex mutex_;
  std::set<unsigned> beginning_;
};

bool all_are(const uint32_t* words, int count, uint32_t value) {
  return std::all_of(words, words + count, [&](uint32_t word) { return word == value; });
}

// Callbacks of this test, and of no other.
struct Callbacks {
  ~Callbacks() {
    on_store_release = nullptr;
    on_let_next_begin = nullptr;
  }
};

unsigned copying_blocks(const Shape& shape, bool kernel_fetches) {
  const int64_t plane = int64_t{shape.rows} * ((2 * shape.head_dim + 15) / 16);  // pieces
  const int64_t runs = shape.heads * 2 * shape.batch * ((plane + 255) / 256);
  const int64_t most = kernel_fetches ? lanes::multiprocessors / 4 : lanes::multiprocessors;
  return static_cast<unsigned>(std::clamp<int64_t>((runs + 31) / 32, 1, most));
}

}  // namespace

TEST_CASE("on lanes: heads are told of when they are staged, and counters are 0 again") {
  const std::vector<Shape> shapes = {{1, 1, 1, 8, 1},
                                     {2, 257, 5, 72, 300},
                                     {1, 0, 4, 64, 10},
                                     {3, 100, 2, 128, 101},
                                     {1, 33, 33, 200, 40}};
  for (const Shape& shape : shapes) {
    for (const bool kernel_fetches : {false, true}) {
      lanes::multiprocessors = kernel_fetches ? 8 : 2;
      INFO("B " << shape.batch << " S " << shape.rows << " H " << shape.heads << " D "
                << shape.head_dim << ", a kernel fetches: " << kernel_fetches);
      Call call(shape, kernel_fetches);
      const unsigned blocks = copying_blocks(shape, kernel_fetches) + 1;
      const Faults faults(call, blocks);
      REQUIRE(stage(call.params, nullptr) == cudaSuccess);
      CHECK(call.has_staged(0, shape.heads));
      CHECK(all_are(call.words.signals, kPeers, staged_heads(shape.heads)));
      CHECK(all_are(call.words.told, kPeers, kTag));
      CHECK(all_are(call.words.for_streams, kPeers, kTag));
      CHECK(all_are(call.words.back_for_streams, kPeers, 0));
      CHECK(all_are(call.words.taken_back, kPeers, 0));
      CHECK(all_are(call.words.counters, kStageCounters, 0));
      CHECK(call.words.calls_shown == 7);
      CHECK(call.words.phase_shown == 9);
      CHECK(faults.early_heads == 0);
      CHECK(faults.early_word == 0);
      CHECK(faults.early_tag == 0);
      CHECK(faults.early_for_streams == 0);
      CHECK(call.words.unlike == 0);
      CHECK(call.words.failed == 0);
      CHECK(faults.falls_back == 0);
      CHECK(faults.begins_early == 0);
      CHECK(faults.lets_begin(blocks));
    }
  }
}

TEST_CASE("on lanes: many heads are told of part by part") {
  lanes::multiprocessors = 4;
  Call call({1, 700, 9, 128, 700}, /*kernel_fetches=*/true);
  std::set<uint32_t> told;
  const Callbacks callbacks;
  on_store_release = [&](const uint32_t* word, uint32_t value) {
    if (word == call.words.signals) told.insert(value);
  };
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  // Of one thread block, 32 runs a round: 44 runs a plane, 18 planes, in parts of two heads.
  CHECK(told == std::set<uint32_t>{kBeingStaged, staged_heads(2), staged_heads(4), staged_heads(6),
                                   staged_heads(8), staged_heads(9)});
}

TEST_CASE("on lanes: who has given up stages nothing and tells nobody") {
  lanes::multiprocessors = 8;
  for (const bool kernel_fetches : {true, false}) {
    for (const bool known_to_streams : {true, false}) {
      Call call({1, 300, 3, 64, 300}, kernel_fetches);
      (known_to_streams ? call.words.seen : call.words.failed) = kGivenUp;
      REQUIRE(stage(call.params, nullptr) == cudaSuccess);
      CHECK(call.has_staged_nothing());
      CHECK(all_are(call.words.signals, kPeers, 0));
      CHECK(all_are(call.words.taken_back, kPeers, 1));
      CHECK(all_are(call.words.for_streams, kPeers, 0));
      CHECK(all_are(call.words.back_for_streams, kPeers, 1));
    }
  }
}

TEST_CASE("on lanes: nobody is told anything before the last call's words are all there") {
  lanes::multiprocessors = 4;
  for (const bool kernel_fetches : {true, false}) {
    Call call({1, 64, 2, 64, 64}, kernel_fetches);
    call.words.taken_back[1] = 0;  // under way
    std::atomic<bool> comes{false}, too_early{false};
    const Callbacks callbacks;
    on_store_release = [&](const uint32_t*, uint32_t) {
      if (!comes) too_early = true;
    };
    std::thread peer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      comes = true;
      __atomic_store_n(&call.words.taken_back[1], 1, __ATOMIC_RELEASE);
    });
    const cudaError_t error = stage(call.params, nullptr);
    peer.join();
    CHECK(error == cudaSuccess);
    CHECK_FALSE(too_early);
    CHECK(all_are(call.words.taken_back, kPeers, 0));
    CHECK(all_are(call.words.for_streams, kPeers, kTag));
  }
}

TEST_CASE("on lanes: what streams know to be given up the kernel behind knows before it begins") {
  lanes::multiprocessors = 8;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
  call.words.seen = kGivenUp;
  std::atomic<bool> too_early{false};
  const Callbacks callbacks;
  on_let_next_begin = [&] {
    const bool waits = blockIdx.x == gridDim.x - 1;
    if (waits && threadIdx.x == 0 && call.words.failed == 0) too_early = true;
  };
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  CHECK_FALSE(too_early);
  CHECK(call.words.failed == kGivenUp);
}

TEST_CASE("on lanes: a rank in another call is seen before the kernel behind begins") {
  lanes::multiprocessors = 8;
  for (const int other : {0, kPeers - 1}) {
    for (const uint32_t tag : {kTag + 1, kNoCall}) {
      Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
      Words& words = call.words;
      words.theirs[other] = tag;
      std::atomic<bool> too_early{false};
      const Callbacks callbacks;
      on_let_next_begin = [&] {
        const bool waits = blockIdx.x == gridDim.x - 1;
        if (waits && threadIdx.x == 0 && words.failed == 0) too_early = true;
      };
      REQUIRE(stage(call.params, nullptr) == cudaSuccess);
      CHECK_FALSE(too_early);
      CHECK(words.failed == kInAnotherCall);
      CHECK(words.unlike == 1u + other + (tag == kNoCall ? kMaxSignals : 0));
      // The others are to see it, too, whichever thread block is first.
      CHECK((all_are(words.told, kPeers, kTag) || all_are(words.told, kPeers, kNoCall)));
      CHECK(all_are(words.signals, kPeers, staged_heads(2)));
    }
  }
}

TEST_CASE("on lanes: a word that does not come is not taken back, and who would set it not told") {
  lanes::multiprocessors = 4;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/false);
  Words& words = call.words;
  words.taken_back[1] = 0;
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    __atomic_store_n(&words.given_up, kGivenUp, __ATOMIC_RELEASE);
  });
  const cudaError_t error = stage(call.params, nullptr);
  host.join();
  CHECK(error == cudaSuccess);
  CHECK(words.failed == kGivenUp);
  CHECK(words.told[1] == 0);
  CHECK(words.back_for_streams[1] == 1);
  CHECK(words.back_for_streams[2] == 0);
}

TEST_CASE("on lanes: who has seen a rank in another call says so in the next one") {
  lanes::multiprocessors = 8;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
  call.words.failed = kInAnotherCall;
  call.words.awaited[1] = 0;  // nobody is waited for
  call.words.theirs[0] = kTag + 1;
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  CHECK(all_are(call.words.told, kPeers, kNoCall));
  CHECK(all_are(call.words.for_streams, kPeers, kNoCall));
  CHECK(all_are(call.words.signals, kPeers, staged_heads(2)));
  CHECK(call.words.failed == kInAnotherCall);
  CHECK(call.words.unlike == 0);
}

TEST_CASE("on lanes: where no kernel fetches nobody looks at tags, but they are told") {
  lanes::multiprocessors = 2;
  Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/false);
  call.words.theirs[1] = kTag + 1;
  REQUIRE(stage(call.params, nullptr) == cudaSuccess);
  CHECK(call.words.failed == 0);
  CHECK(all_are(call.words.told, kPeers, kTag));
}

TEST_CASE("on lanes: the kernel behind begins when all others are staging, or the host gives up") {
  lanes::multiprocessors = 4;
  enum class Ends { kByItself, kFailed, kGivenUp };
  for (const Ends ends : {Ends::kByItself, Ends::kFailed, Ends::kGivenUp}) {
    Call call({1, 64, 2, 64, 64}, /*kernel_fetches=*/true);
    Words& words = call.words;
    words.awaited[1] = 0;
    std::atomic<bool> comes{false}, too_early{false};
    const Callbacks callbacks;
    on_let_next_begin = [&] {
      if (blockIdx.x == 1 && !comes) too_early = true;  // the thread block that waits
    };
    std::thread host([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      comes = true;
      uint32_t& word = ends == Ends::kByItself ? words.awaited[1]
                       : ends == Ends::kFailed ? words.failed
                                               : words.given_up;
      const uint32_t value = ends == Ends::kByItself ? kBeingStaged : kGivenUp;
      __atomic_store_n(&word, value, __ATOMIC_RELEASE);
    });
    const cudaError_t error = stage(call.params, nullptr);
    host.join();
    CHECK(error == cudaSuccess);
    CHECK_FALSE(too_early);
    CHECK((words.failed != 0) == (ends != Ends::kByItself));
    if (ends == Ends::kByItself) CHECK(call.has_staged(0, 2));
  }
}
