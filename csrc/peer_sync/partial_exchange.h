// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "peer_sync/protocol.h"

// The protocol by which all ranks of one host give each other a small result each, in one kernel on
// every rank: the partials of decode attention. This page is its specification, beside that of
// blocks (protocol.h), with which it shares `failed`, given_up and the tag of a call. Plain data.
//
// Every rank has an exchange region in device memory; all ranks map all of them. Exchanges are
// numbered on the device (kNumber), so a captured exchange can be replayed: all ranks make the same
// exchanges in the same order. The parity of the number chooses one of two halves of the region.
//
//   of r's region             writer, order               value                 reader
//   ------------------------  --------------------------  --------------------  -----------------
//   slots[parity][p]          p, before its signals       p's partial           r, behind signals
//   signals[parity][p][c]     p, release, system scope,   signal_value(number,  r, acquire
//                             after chunk c of the slot   tag)
//   words                     r                           ExchangeWord          r, its watchdog
//
// Every thread block writes all of its chunks to all ranks before it waits for a chunk of a peer.
// The thread blocks of one rank do not wait for each other.
//
// Nothing is cleared. A chunk has arrived when its signal has the number of the exchange. Rank r
// writes slot and signals of exchange n + 2 over those of exchange n, on rank p:
//   - r is in n + 2, so its kernel of n + 1 has ended, and all of its waits have been successful
//     (a rank that has waited for a failed group has `failed` set, and writes nothing any more);
//   - that kernel has got a signal of n + 1 from p;
//   - p's kernel of n + 1 has begun, so its kernel of n has ended: both are on one stream, or
//     ordered between streams, and a replay is ordered by the graph's caller;
//   - so p has read all of n.
// One half would not be enough: r may be in n + 1 while p reads n. A number is used again after
// 2^32 exchanges; a chunk that no exchange in between has had would be taken as having arrived.
//
// Call mismatch. A signal holds the tag of its call. A rank that gets the number of its exchange
// with another tag sets `failed` to kCallMismatch. A peer that makes a ring in place of the
// exchange sends no signal: a rank that waits for long looks whether that peer is staging
// (staged_by_peer). If so, and the signal has still not come, it never will: a rank stages only
// after the signals of all of its earlier exchanges.
//
// Failure. A rank that finds `failed` set at the begin of an exchange writes and signals nothing,
// and its results are NaN. So are those of each chunk that does not come. Peers find out by
// their own wait: by a signal with another tag, or by their watchdog.
//
// What waits holds at most kMaxExchangeBlocks small thread blocks of a rank. Thread blocks of all
// ranks that share a device fit on it together, and whatever else runs there does not wait for them
// with more than what protocol.h allows.

namespace ringattn {

/// The largest partial of a rank.
constexpr int64_t kMaxPartialBytes = int64_t{1} << 20;
/// A partial is signalled in chunks, at most so many.
constexpr int32_t kMaxPartialChunks = 64;
constexpr int32_t kMaxExchangeBlocks = 16;

/// Values of a rank's own in its region, uint32.
enum ExchangeWord : int32_t {
  kNumber,      // of the present or the next exchange; kFirstExchange at first
  kBlocksDone,  // 0 before and after an exchange
  kLateChunks,  // the chunks of an exchange that has waited for long; otherwise 0
  kExchangeWords
};

constexpr uint32_t kFirstExchange = 1;
/// Parities alternate, and 0, the initial value of signals, is no number.
constexpr uint32_t next_exchange(uint32_t number) { return number == UINT32_MAX ? 2 : number + 1; }

constexpr uint64_t signal_value(uint32_t number, uint32_t tag) {
  return uint64_t{number} << 32 | tag;
}
constexpr uint32_t number_of(uint64_t signal) { return static_cast<uint32_t>(signal >> 32); }
constexpr uint32_t tag_of(uint64_t signal) { return static_cast<uint32_t>(signal); }

/// What stands for the number of an exchange in a phase that the watchdog sees: never 0.
constexpr uint32_t exchange_shown(uint32_t number) { return 1 + (number & 0x0fffffff); }

/// What a kernel needs to exchange partials, in the order of ranks.
struct PartialExchange {
  static constexpr int kMaxRanks = PeerSignals::kMaxPeers;

  float* slots[kMaxRanks] = {};                    // of each rank's region, [2, W, kSlotFloats]
  uint64_t* signals[kMaxRanks] = {};               // [2, W, kMaxPartialChunks]
  uint32_t* words = nullptr;                       // of this rank, [kExchangeWords]
  const uint32_t* staged_by_peer[kMaxRanks] = {};  // protocol.h; of this rank: null
  int32_t rank = 0;
  int32_t num_ranks = 0;

  uint32_t tag = 0;  // of this rank's call; not 0
  /// Host memory: 1 + the index, among the peers, of one in another call.
  uint32_t* mismatch = nullptr;
  uint32_t* failed = nullptr;
  const uint32_t* given_up = nullptr;  // host memory

  // Host memory where a thread block that waits for long shows the watchdog what it waits for.
  uint32_t* phase = nullptr;
  uint32_t phase_working = 0;        // after an exchange that has shown the next one
  uint32_t phase_until_partial = 0;  // plus exchange_shown(number) times
  uint32_t phase_per_exchange = 0;
  /// For tests: if not 0, chunks are delayed by random times drawn from it.
  uint32_t delay_seed = 0;

  static constexpr int64_t kSlotFloats = kMaxPartialBytes / sizeof(float);
  constexpr int64_t slot(uint32_t number, int64_t writer) const {
    return (number % 2 * num_ranks + writer) * kSlotFloats;
  }
  constexpr int64_t signal(uint32_t number, int64_t writer, int64_t chunk) const {
    return (number % 2 * num_ranks + writer) * kMaxPartialChunks + chunk;
  }
};

}  // namespace ringattn
