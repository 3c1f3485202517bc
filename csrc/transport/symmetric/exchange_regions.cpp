// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/exchange_regions.h"

#include <algorithm>
#include <utility>

#include "core/ceil_div.h"

namespace ringattn {
namespace {

constexpr int64_t kAlignment = 256;

// A region: [2, W, kSlotFloats] floats, [2, W, kMaxPartialChunks] signals, then the words.
int64_t slot_bytes(int64_t num_ranks) { return 2 * num_ranks * kMaxPartialBytes; }
int64_t signal_bytes(int64_t num_ranks) {
  return 2 * num_ranks * kMaxPartialChunks * static_cast<int64_t>(sizeof(uint64_t));
}
int64_t word_bytes() { return kExchangeWords * static_cast<int64_t>(sizeof(uint32_t)); }

}  // namespace

size_t ExchangeRegions::bytes(int64_t num_ranks) {
  const int64_t used = slot_bytes(num_ranks) + signal_bytes(num_ranks) + word_bytes();
  return static_cast<size_t>(ceil_div(used, kAlignment) * kAlignment);
}

ExchangeRegions::ExchangeRegions(std::vector<void*> regions, int64_t rank)
    : regions_(std::move(regions)), rank_(rank) {}

void ExchangeRegions::initialise(const Copy& copy) const {
  const PartialExchange own = addresses();
  const std::vector<uint64_t> no_signals(2 * own.num_ranks * kMaxPartialChunks, 0);
  std::vector<uint32_t> words(kExchangeWords, 0);
  words[kNumber] = kFirstExchange;
  copy(own.signals[rank_], no_signals.data(), no_signals.size() * sizeof(uint64_t));
  copy(own.words, words.data(), words.size() * sizeof(uint32_t));
}

PartialExchange ExchangeRegions::addresses() const {
  PartialExchange exchange;
  exchange.rank = static_cast<int32_t>(rank_);
  exchange.num_ranks = static_cast<int32_t>(regions_.size());
  for (size_t rank = 0; rank < regions_.size(); ++rank) {
    char* const region = static_cast<char*>(regions_[rank]);
    exchange.slots[rank] = reinterpret_cast<float*>(region);
    exchange.signals[rank] = reinterpret_cast<uint64_t*>(region + slot_bytes(exchange.num_ranks));
  }
  exchange.words = reinterpret_cast<uint32_t*>(exchange.signals[rank_]) +
                   signal_bytes(exchange.num_ranks) / sizeof(uint32_t);
  return exchange;
}

std::vector<uint32_t> ExchangeRegions::progress(const Copy& copy) const {
  const PartialExchange own = addresses();
  uint32_t words[kExchangeWords] = {};
  std::vector<uint64_t> signals(2 * own.num_ranks * kMaxPartialChunks, 0);
  copy(words, own.words, sizeof(words));
  copy(signals.data(), own.signals[rank_], signals.size() * sizeof(uint64_t));
  const uint32_t number = words[kNumber];
  std::vector<uint32_t> progress;
  for (int32_t rank = 0; rank < own.num_ranks; ++rank) {
    // Without late chunks no kernel waits, and nothing is missing.
    const uint64_t* const first = signals.data() + own.signal(number, rank, 0);
    const bool has_arrived = std::all_of(first, first + words[kLateChunks], [&](uint64_t signal) {
      return number_of(signal) == number;
    });
    progress.push_back(has_arrived ? exchange_shown(number) : 0);
  }
  return progress;
}

}  // namespace ringattn
