// SPDX-License-Identifier: Apache-2.0
// The regions of three ranks in host memory, as rank 1 sees them.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "catch.h"
#include "transport/symmetric/exchange_regions.h"

using ringattn::exchange_shown;
using ringattn::ExchangeRegions;
using ringattn::kFirstExchange;
using ringattn::kLateChunks;
using ringattn::kMaxPartialChunks;
using ringattn::kNumber;
using ringattn::PartialExchange;
using ringattn::signal_value;

namespace {

constexpr int64_t kRanks = 3;

struct Regions {
  std::vector<std::vector<uint64_t>> memory{
      kRanks, std::vector<uint64_t>(ExchangeRegions::bytes(kRanks) / sizeof(uint64_t), ~0ull)};
  ExchangeRegions view{{memory[0].data(), memory[1].data(), memory[2].data()}, 1};
  PartialExchange addresses = view.addresses();

  Regions() { view.initialise(&copy); }
  static void copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

  // A peer signals chunks [begin, end).
  void signal(uint32_t number, int64_t peer, int64_t begin, int64_t end) const {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      addresses.signals[1][addresses.signal(number, peer, chunk)] = signal_value(number, 77);
    }
  }
  std::vector<uint32_t> progress() const { return view.progress(&copy); }
};

}  // namespace

TEST_CASE("slots, signals and words of a region lie apart and within it") {
  const Regions regions;
  const PartialExchange& addresses = regions.addresses;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const auto* const begin = reinterpret_cast<const char*>(regions.memory[rank].data());
    std::set<const char*> ends;  // of all parts, ascending
    for (const uint32_t number : {2u, 3u}) {
      for (int64_t writer = 0; writer < kRanks; ++writer) {
        const float* const slot = addresses.slots[rank] + addresses.slot(number, writer);
        const auto* const first = reinterpret_cast<const char*>(slot);
        CHECK(first == (ends.empty() ? begin : *ends.rbegin()));
        ends.insert(first + ringattn::kMaxPartialBytes);
      }
    }
    for (const uint32_t number : {2u, 3u}) {
      for (int64_t writer = 0; writer < kRanks; ++writer) {
        const uint64_t* const first = addresses.signals[rank] + addresses.signal(number, writer, 0);
        CHECK(reinterpret_cast<const char*>(first) == *ends.rbegin());
        ends.insert(reinterpret_cast<const char*>(first + kMaxPartialChunks));
      }
    }
    if (rank == 1) CHECK(reinterpret_cast<const char*>(addresses.words) == *ends.rbegin());
    CHECK(*ends.rbegin() + ringattn::kExchangeWords * sizeof(uint32_t) <=
          begin + ExchangeRegions::bytes(kRanks));
  }
}

TEST_CASE("a region begins with the first exchange and without signals; peers' are not touched") {
  const Regions regions;
  CHECK(regions.addresses.words[kNumber] == kFirstExchange);
  CHECK(regions.addresses.words[kLateChunks] == 0);
  const uint64_t* const signals = regions.addresses.signals[1];
  CHECK(std::count(signals, signals + 2 * kRanks * kMaxPartialChunks, 0u) ==
        2 * kRanks * kMaxPartialChunks);
  CHECK(std::count(regions.memory[0].begin(), regions.memory[0].end(), ~0ull) ==
        std::ssize(regions.memory[0]));
}

TEST_CASE("a peer is late as long as one of its chunks is missing") {
  const Regions regions;
  constexpr uint32_t kSeventh = 7;
  const uint32_t shown = exchange_shown(kSeventh);
  regions.addresses.words[kNumber] = kSeventh;
  regions.signal(kSeventh - 2, 0, 0, 5);
  regions.signal(kSeventh, 2, 0, 4);
  CHECK(regions.progress() == std::vector<uint32_t>{shown, shown, shown});  // nothing waits
  regions.addresses.words[kLateChunks] = 5;
  CHECK(regions.progress() == std::vector<uint32_t>{0, 0, 0});
  regions.signal(kSeventh, 2, 4, 5);
  CHECK(regions.progress() == std::vector<uint32_t>{0, 0, shown});
  regions.signal(kSeventh, 0, 0, 5);
  CHECK(regions.progress() == std::vector<uint32_t>{shown, 0, shown});
}
