// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "catch.h"

// The device code of the exchange, with a host thread for each device thread of each rank. Note: in
// a namespace of another name, since the library that the tests link has the kernel for devices.
#define ringattn ringattn_emulated
#include "attention/cuda/exchange_partials.cuh"

namespace {

using namespace ringattn;
using namespace ringattn::cuda;
using std::chrono::milliseconds;

constexpr uint32_t kTag = 77;
constexpr uint32_t kWorking = 8, kUntilPartial = 3, kPerExchange = 8;

struct Shape {
  int batch, queries, heads, head_dim;

  int64_t rows() const { return int64_t{batch} * queries * heads; }
  int64_t floats() const { return rows() * (head_dim + 1); }
};

struct Result {
  std::vector<float> out, lse;

  bool is_nan() const {
    const auto is = [](float x) { return std::isnan(x); };
    return std::all_of(out.begin(), out.end(), is) && std::all_of(lse.begin(), lse.end(), is);
  }
  bool has_bits_of(const Result& other) const {
    return std::memcmp(out.data(), other.out.data(), out.size() * sizeof(float)) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

// A region and the signals of one rank.
struct Rank {
  explicit Rank(int64_t num_ranks)
      : slots(2 * num_ranks * PartialExchange::kSlotFloats, NAN),
        signals(2 * num_ranks * kMaxPartialChunks),
        staged(num_ranks) {}

  std::vector<float> slots;
  std::vector<uint64_t> signals;
  std::vector<uint32_t> staged;
  uint32_t words[kExchangeWords] = {kFirstExchange};
  uint32_t failed = 0, given_up = 0, mismatch = 0, phase = kWorking, tag = kTag;
};

// The ranks of a group. Thread blocks of all of them run together.
class Group {
 public:
  explicit Group(int num_ranks) {
    emulator::multiprocessors = 8;  // two thread blocks
    emulator::blocks_together = true;
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(num_ranks));
    }
  }
  ~Group() {
    emulator::blocks_together = false;
    on_wide_store_release = nullptr;
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& operator[](int rank) const { return *ranks_[rank]; }

  // One exchange of a rank, to its end.
  Result exchange(int rank, const Shape& shape, const std::vector<float>& partial) const {
    Rank& own = *ranks_[rank];
    ExchangePartialsParams params;
    PartialExchange& exchange = params.exchange;
    for (int other = 0; other < size(); ++other) {
      exchange.slots[other] = ranks_[other]->slots.data();
      exchange.signals[other] = ranks_[other]->signals.data();
      if (other != rank) exchange.staged_by_peer[other] = &own.staged[other];
    }
    exchange.words = own.words;
    exchange.rank = rank;
    exchange.num_ranks = size();
    exchange.tag = own.tag;
    exchange.mismatch = &own.mismatch;
    exchange.failed = &own.failed;
    exchange.given_up = &own.given_up;
    exchange.phase = &own.phase;
    exchange.phase_working = kWorking;
    exchange.phase_until_partial = kUntilPartial;
    exchange.phase_per_exchange = kPerExchange;
    Result result{std::vector<float>(shape.rows() * shape.head_dim, -7.0f),
                  std::vector<float>(shape.rows(), -7.0f)};
    params.partial = partial.data();
    params.out = result.out.data();
    params.lse = result.lse.data();
    params.batch = shape.batch;
    params.num_queries = shape.queries;
    params.num_heads = shape.heads;
    params.head_dim = shape.head_dim;
    if (launch_exchange_partials<float>(params, nullptr) != cudaSuccess)
      throw std::logic_error("not launched");
    return result;
  }

  // `body` of every rank, all at the same time.
  void run(const std::function<void(int rank)>& body) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

  // How many signals a rank has got from another one.
  int64_t num_signals(int writer, int reader) const {
    int64_t count = 0;
    for (const uint64_t& signal : ranks_[reader]->signals) {
      const bool is_there = __atomic_load_n(&signal, __ATOMIC_ACQUIRE) != 0;
      if (is_there && find(&signal).writer == writer) ++count;
    }
    return count;
  }

  // The rank in whose region a signal lies, and the one that writes it.
  struct Signal {
    int reader = 0, writer = 0;
  };
  Signal find(const uint64_t* signal) const {
    for (int reader = 0; reader < size(); ++reader) {
      const int64_t i = signal - ranks_[reader]->signals.data();
      if (0 <= i && i < static_cast<int64_t>(ranks_[reader]->signals.size())) {
        return {reader, static_cast<int>(i / kMaxPartialChunks % size())};
      }
    }
    throw std::logic_error("no such signal");
  }

 private:
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Some states are empty, as on a rank without keys.
std::vector<float> partial_of(const Shape& shape, int rank, int number) {
  std::mt19937 random(rank * 1000 + number);
  std::normal_distribution<float> normal;
  std::vector<float> partial(shape.floats());
  for (float& x : partial) x = normal(random);
  for (int64_t row = 0; row < shape.rows(); ++row) {
    float& lse = partial[shape.rows() * shape.head_dim + row];
    if ((row + rank) % 5 == 0) lse = -INFINITY;
  }
  return partial;
}

// The largest error of a result, by the definition of a merge.
double error_of(const Result& result, const Shape& shape, int num_ranks, int number) {
  std::vector<std::vector<float>> partials;
  for (int rank = 0; rank < num_ranks; ++rank) partials.push_back(partial_of(shape, rank, number));
  double error = 0.0;
  for (int64_t row = 0; row < shape.rows(); ++row) {
    const int64_t head = row % shape.heads, query = row / shape.heads % shape.queries;
    const int64_t batch = row / shape.heads / shape.queries;
    const int64_t lse = (batch * shape.heads + head) * shape.queries + query;
    double total = 0.0;
    for (const auto& partial : partials) {
      total += std::exp(double{partial[shape.rows() * shape.head_dim + lse]});
    }
    if (total == 0.0) {
      if (!std::isinf(result.lse[lse])) return INFINITY;
    } else {
      error = std::max(error, std::abs(result.lse[lse] - std::log(total)));
    }
    for (int64_t i = row * shape.head_dim; i < (row + 1) * shape.head_dim; ++i) {
      double sum = 0.0;
      for (const auto& partial : partials) {
        sum += std::exp(double{partial[shape.rows() * shape.head_dim + lse]}) * partial[i];
      }
      const double difference = std::abs(result.out[i] - (total == 0.0 ? 0.0 : sum / total));
      error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    }
  }
  return error;
}

}  // namespace

TEST_CASE("emulated: every rank gets the merge of all partials, in exchange after exchange") {
  // One chunk; more chunks than thread blocks; chunks of several rounds of rows; no rows.
  const std::vector<Shape> shapes = {{1, 1, 3, 64}, {2, 3, 5, 136}, {1, 1, 300, 8}, {1, 0, 4, 64}};
  for (const int num_ranks : {2, 3}) {
    const Group group(num_ranks);
    // Rank 0 is in its next exchange before rank 1 has read what rank 0 gave it in this one:
    // signals from rank 2 come late there, and rank 1 itself is late after it has signalled to rank
    // 0.
    on_wide_store_release = [&](const uint64_t* signal, uint64_t) {
      const auto [reader, writer] = group.find(signal);
      if (reader + writer == 3) std::this_thread::sleep_for(milliseconds(writer == 1 ? 40 : 20));
    };
    const int rounds = 2 * static_cast<int>(shapes.size());
    std::vector<std::vector<Result>> results(num_ranks);
    group.run([&](int rank) {
      for (int number = 0; number < rounds; ++number) {
        const Shape& shape = shapes[number % shapes.size()];
        results[rank].push_back(group.exchange(rank, shape, partial_of(shape, rank, number)));
      }
    });
    for (int number = 0; number < rounds; ++number) {
      INFO(num_ranks << " ranks, exchange " << number);
      const Shape& shape = shapes[number % shapes.size()];
      CHECK(error_of(results[0][number], shape, num_ranks, number) < 1e-5);
      for (int rank = 1; rank < num_ranks; ++rank) {
        CHECK(results[rank][number].has_bits_of(results[0][number]));
      }
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      CHECK(group[rank].words[kNumber] == kFirstExchange + rounds);
      CHECK(group[rank].words[kBlocksDone] == 0);
      CHECK(group[rank].words[kLateChunks] == 0);
      CHECK(group[rank].phase == kWorking);
      CHECK(group[rank].failed == 0);
    }
  }
}

TEST_CASE("emulated: numbers of exchanges wrap around") {
  const Group group(2);
  const Shape shape{1, 1, 5, 64};
  for (int rank = 0; rank < 2; ++rank) group[rank].words[kNumber] = UINT32_MAX - 1;
  std::vector<std::vector<Result>> results(2);
  group.run([&](int rank) {
    for (int number = 0; number < 4; ++number) {
      results[rank].push_back(group.exchange(rank, shape, partial_of(shape, rank, number)));
    }
  });
  for (int number = 0; number < 4; ++number) {
    CHECK(error_of(results[0][number], shape, 2, number) < 1e-5);
    CHECK(error_of(results[1][number], shape, 2, number) < 1e-5);
  }
  CHECK(group[0].words[kNumber] == 4);  // UINT32_MAX is odd, so 2 comes behind it
}

TEST_CASE("emulated: a signal follows the data of its chunk, to every peer") {
  const Group group(2);
  const Shape shape{1, 1, 30, 64};  // eight chunks
  std::vector<std::vector<float>> partials;
  for (int rank = 0; rank < 2; ++rank) partials.push_back(partial_of(shape, rank, 0));
  std::atomic<int> signals{0}, early{0};
  on_wide_store_release = [&](const uint64_t* signal, uint64_t value) {
    ++signals;
    const auto [reader, writer] = group.find(signal);
    const int64_t chunk = (signal - group[reader].signals.data()) % kMaxPartialChunks;
    const float* const slot = group[reader].slots.data() +
                              (number_of(value) % 2 * 2 + writer) * PartialExchange::kSlotFloats;
    for (int64_t row = 4 * chunk; row < std::min<int64_t>(4 * chunk + 4, shape.rows()); ++row) {
      const int64_t lse = shape.rows() * shape.head_dim + row;
      if (slot[lse] != partials[writer][lse]) ++early;
      for (int64_t i = row * shape.head_dim; i < (row + 1) * shape.head_dim; ++i) {
        if (slot[i] != partials[writer][i]) ++early;
      }
    }
  };
  group.run([&](int rank) { group.exchange(rank, shape, partials[rank]); });
  CHECK(signals == 2 * 8);
  CHECK(early == 0);
}

TEST_CASE("emulated: a rank that has failed writes nothing, does not wait and gets NaN") {
  const Shape shape{1, 2, 10, 64};
  for (const uint32_t failure : {kGivenUp, kCallMismatch}) {
    const Group group(2);
    group[0].failed = failure;
    CHECK(group.exchange(0, shape, partial_of(shape, 0, 0)).is_nan());
    const Rank& peer = group[1];
    CHECK(std::all_of(peer.slots.begin(), peer.slots.end(), [](float x) { return std::isnan(x); }));
    CHECK(std::count(peer.signals.begin(), peer.signals.end(), 0u) == std::ssize(peer.signals));
    CHECK(group[0].failed == failure);
    CHECK(group[0].words[kNumber] == kFirstExchange + 1);
    CHECK(group[0].words[kBlocksDone] == 0);
  }
}

TEST_CASE(
    "emulated: a rank whose peer does not come shows it, and gets NaN once the host gives up") {
  const Shape shape{1, 2, 10, 64};  // five chunks
  for (const bool by_host_memory : {true, false}) {
    const Group group(3);
    Rank& own = group[0];
    uint32_t shown = 0, late_chunks = 0;
    std::thread host([&] {
      while (__atomic_load_n(&own.phase, __ATOMIC_ACQUIRE) == kWorking) std::this_thread::yield();
      shown = __atomic_load_n(&own.phase, __ATOMIC_RELAXED);
      late_chunks = __atomic_load_n(&own.words[kLateChunks], __ATOMIC_RELAXED);
      while (group.num_signals(0, 1) < 5) std::this_thread::yield();  // all of its blocks run
      __atomic_store_n(by_host_memory ? &own.given_up : &own.failed, kGivenUp, __ATOMIC_RELEASE);
    });
    Result result[2];
    std::thread peer([&] { result[1] = group.exchange(1, shape, partial_of(shape, 1, 0)); });
    result[0] = group.exchange(0, shape, partial_of(shape, 0, 0));
    host.join();
    CHECK(shown == kUntilPartial + kPerExchange * exchange_shown(kFirstExchange));
    CHECK(late_chunks == 5);
    CHECK(result[0].is_nan());
    CHECK(own.failed == kGivenUp);
    CHECK(own.phase == kWorking);
    CHECK(own.words[kLateChunks] == 0);
    // Rank 1 has all of rank 0, and the late rank 2 gives it the rest.
    const Result late = group.exchange(2, shape, partial_of(shape, 2, 0));
    peer.join();
    CHECK(error_of(result[1], shape, 3, 0) < 1e-5);
    CHECK(late.has_bits_of(result[1]));
    // And in the next exchange rank 0 does not touch them.
    const std::vector<float> before = group[1].slots;
    CHECK(group.exchange(0, shape, partial_of(shape, 0, 1)).is_nan());
    CHECK(std::memcmp(before.data(), group[1].slots.data(), before.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("emulated: ranks in different calls get NaN and know which rank is in another one") {
  const Shape shape{1, 1, 10, 64}, other_shape{1, 1, 3, 64};
  const Group group(3);
  group[1].tag = kTag + 1;
  Result results[3];
  group.run([&](int rank) {
    const Shape& own_shape = rank == 1 ? other_shape : shape;
    results[rank] = group.exchange(rank, own_shape, partial_of(own_shape, rank, 0));
  });
  for (int rank = 0; rank < 3; ++rank) {
    INFO("rank " << rank);
    CHECK(results[rank].is_nan());
    CHECK(group[rank].failed == kCallMismatch);
  }
  CHECK(group[0].mismatch == 1);  // rank 1 is its first peer
  CHECK((group[1].mismatch == 1 || group[1].mismatch == 2));
  CHECK(group[2].mismatch == 2);
}

TEST_CASE("emulated: a peer that is staging for a ring is in another call") {
  const Shape shape{1, 1, 3, 64};
  const Group group(3);
  group[2].staged[1] = kBeingStaged;
  Result results[3];
  group.run([&](int rank) {
    if (rank == 1) return;
    results[rank] = group.exchange(rank, shape, partial_of(shape, rank, 0));
    // Its watchdog ends the group for all.
    if (rank == 2) __atomic_store_n(&group[0].given_up, kGivenUp, __ATOMIC_RELEASE);
  });
  CHECK(results[2].is_nan());
  CHECK(group[2].failed == kCallMismatch);
  CHECK(group[2].mismatch == 2);
  CHECK(results[0].is_nan());
  CHECK(group[0].failed == kGivenUp);
  CHECK(group[0].mismatch == 0);
}

TEST_CASE("emulated: a peer that comes late may be staging for its next call") {
  const Shape shape{1, 1, 3, 64};
  const Group group(2);
  Result results[2];
  group.run([&](int rank) {
    if (rank == 1) {
      while (__atomic_load_n(&group[0].phase, __ATOMIC_ACQUIRE) == kWorking) {
        std::this_thread::yield();
      }
    }
    results[rank] = group.exchange(rank, shape, partial_of(shape, rank, 0));
    if (rank == 1) __atomic_store_n(&group[0].staged[1], kBeingStaged, __ATOMIC_RELEASE);
  });
  CHECK(error_of(results[0], shape, 2, 0) < 1e-5);
  CHECK(results[1].has_bits_of(results[0]));
  CHECK(group[0].phase == kWorking);
}

TEST_CASE("emulated: a partial that is larger than a slot is not launched") {
  ExchangePartialsParams params;
  params.batch = 1;
  params.num_queries = 64;
  params.num_heads = 64;
  params.head_dim = 64;  // 1 MiB without lse
  CHECK(launch_exchange_partials<float>(params, nullptr) == cudaErrorInvalidConfiguration);
}
